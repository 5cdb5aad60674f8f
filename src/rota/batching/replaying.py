"""Orders of ranks and their times: each op starts as early as its rank and what it reads allow."""

from __future__ import annotations

import numpy as np
from numba import njit

from rota.batching.dispatching import NEVER


@njit(cache=True, nogil=True)
def replay(tables, sequence, orders, starts, most):  # type: ignore[no-untyped-def]
    """The makespan of orders; `NEVER` if it is above `most` or the orders wait in a cycle. Fills `starts`.

    `sequence`: int64[num_microbatches]; `orders`: int32[num_ranks, most ops of a rank], where the k-th appearance of a
    task is the k-th micro-batch of the sequence; `starts`: int64[num_microbatches, num_tasks].
    """
    num_ranks = len(tables.tails_us)
    done = np.zeros(tables.durations_us.shape[1], np.int64)
    at, free = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    return _go_on(tables, sequence, orders, starts, done, at, free, tables.loads_us.copy(), most)


@njit(cache=True, nogil=True)
def replay_since(tables, sequence, orders, starts, work, since, most):  # type: ignore[no-untyped-def]
    """As `replay`, where `starts` is right for all ops that start before `since`, and stays as it is for them.

    `work`: int64[num_tasks, num_microbatches + 1], the time of the first k ops of each task, also before `since`.
    """
    durations, rank_of = tables.durations_us, tables.rank_of
    count, num_tasks = durations.shape
    num_ranks = len(tables.tails_us)
    done = np.zeros(num_tasks, np.int64)
    at, free = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    rest = tables.loads_us.copy()
    for t in range(num_tasks):
        low, high = 0, count
        while low < high:
            middle = (low + high) // 2
            if starts[sequence[middle], t] < since:
                low = middle + 1
            else:
                high = middle
        if low > 0:
            r, m = rank_of[t], sequence[low - 1]
            done[t] = low
            at[r] += low
            free[r] = max(free[r], starts[m, t] + durations[m, t])
            rest[r] -= work[t, low]
    return _go_on(tables, sequence, orders, starts, done, at, free, rest, most)


@njit(cache=True, nogil=True)
def _go_on(tables, sequence, orders, starts, done, at, free, rest, most):  # type: ignore[no-untyped-def]
    """The makespan, from where each rank is in its order: `rest` has its work that is left, and the tail after it."""
    durations, lags, first_in = tables.durations_us, tables.lags_us, tables.first_in
    in_edge, in_task, first_on = tables.in_edge, tables.in_task, tables.first_on
    count = len(sequence)
    num_ranks, left = len(at), 0
    for r in range(num_ranks):
        left += count * (first_on[r + 1] - first_on[r]) - at[r]
    sweep = 0
    while left > 0:
        before = left
        for q in range(num_ranks):
            r = q if sweep % 2 == 0 else num_ranks - 1 - q  # forwards go up, backwards go down
            end = count * (first_on[r + 1] - first_on[r])
            i, now, still = at[r], free[r], rest[r]
            while i < end:
                t = orders[r, i]
                k = done[t]
                m, begin, has_inputs = sequence[k], now, True
                for j in range(first_in[t], first_in[t + 1]):
                    u = in_task[j]
                    if done[u] <= k:
                        has_inputs = False
                        break
                    begin = max(begin, starts[m, u] + durations[m, u] + lags[m, in_edge[j]])
                if not has_inputs:
                    break
                if begin + still > most:
                    return NEVER
                starts[m, t] = begin
                now = begin + durations[m, t]
                still -= durations[m, t]
                done[t] = k + 1
                i += 1
            left -= i - at[r]
            at[r], free[r], rest[r] = i, now, still
        if left == before:
            return NEVER
        sweep += 1
    makespan = 0
    for r in range(num_ranks):
        makespan = max(makespan, free[r] + tables.tails_us[r])
    return makespan


@njit(cache=True, nogil=True)
def fits(tables, limits, sequence, orders, only):  # type: ignore[no-untyped-def]
    """Whether orders keep within the limits on rank `only`, or on all ranks if that is -1; transfers do not count."""
    held, peaks, first_on = tables.held_bytes, tables.peak_bytes, tables.first_on
    count = len(sequence)
    done = np.zeros(held.shape[1], np.int64)
    for r in range(len(limits)):
        if only >= 0 and only != r:
            continue
        level = 0
        for i in range(count * (first_on[r + 1] - first_on[r])):
            t = orders[r, i]
            m = sequence[done[t]]
            done[t] += 1
            if level + max(held[m, t], 0) + peaks[m, t] > limits[r]:
                return False
            level += held[m, t]
    return True
