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
    durations, lags, first_in = tables.durations_us, tables.lags_us, tables.first_in
    in_edge, in_task, first_on, tails = tables.in_edge, tables.in_task, tables.first_on, tables.tails_us
    count, num_tasks = durations.shape
    num_ranks = len(tails)
    done = np.zeros(num_tasks, np.int64)
    at, free = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    left, sweep = count * num_tasks, 0
    while left > 0:
        before = left
        for q in range(num_ranks):
            r = q if sweep % 2 == 0 else num_ranks - 1 - q  # forwards go up, backwards go down
            end = count * (first_on[r + 1] - first_on[r])
            i, now = at[r], free[r]
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
                starts[m, t] = begin
                now = begin + durations[m, t]
                if now + tails[r] > most:
                    return NEVER
                done[t] = k + 1
                i += 1
            left -= i - at[r]
            at[r], free[r] = i, now
        if left == before:
            return NEVER
        sweep += 1
    makespan = 0
    for r in range(num_ranks):
        makespan = max(makespan, free[r] + tails[r])
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
