"""Orders of ranks, their times and what they hold: each op starts as early as its rank and what it reads allow."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rota.batching.dispatching import NEVER, Dispatch
from rota.batching.problem import BatchProblem, Integers, Orders, Tables
from rota.compiled import inner, loop

_TRANSFER_ENDS, _OP_ENDS, _TRANSFER_STARTS, _OP = range(4)  # events at one instant come in this order


class _Progress(NamedTuple):
    """Where a replay is."""

    done: Integers  #: int64[num_tasks]: ops that have a start
    at: Integers  #: int64[num_ranks]: where in its order each rank is
    free_us: Integers  #: int64[num_ranks]
    rest_us: Integers  #: int64[num_ranks]: its work that is left, and what follows it


@loop
def replay(tables: Tables, sequence: Integers, orders: Orders, starts: Integers, most: int) -> int:
    """The makespan of orders; `NEVER` if it is above `most` or the orders wait in a cycle. Fills `starts`.

    `sequence`: int64[num_microbatches]; `orders`: int32[num_ranks, most ops of a rank], where the k-th appearance of a
    task is the k-th micro-batch of the sequence; `starts`: int64[num_microbatches, num_tasks].
    """
    num_ranks = len(tables.tails_us)
    done = np.zeros(tables.durations_us.shape[1], np.int64)
    at, free = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    return _go_on(tables, sequence, orders, starts, _Progress(done, at, free, tables.loads_us.copy()), most)


@loop
def replay_since(
    tables: Tables, sequence: Integers, orders: Orders, starts: Integers, work: Integers, since: int, most: int
) -> int:
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
    return _go_on(tables, sequence, orders, starts, _Progress(done, at, free, rest), most)


@inner
def _go_on(tables: Tables, sequence: Integers, orders: Orders, starts: Integers, progress: _Progress, most: int) -> int:
    """The makespan, from where each rank is in its order."""
    done, at, free, rest = progress
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


@loop
def fits(tables: Tables, limits: Integers, sequence: Integers, orders: Orders, only: int) -> bool:
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


def peaks_bytes(problem: BatchProblem, sequence: Integers, orders: Dispatch) -> Integers:
    """int64[num_ranks]: the most that each rank holds at any time, without static bytes.

    That is the account of `rota.core.timeline`, on arrays; transfers count.
    """
    result = np.zeros(problem.num_ranks, np.int64)
    _fill(problem.tables, problem.edges, problem.edge_bytes, sequence, orders.starts_us, orders.orders, result)
    return result


@loop
def _fill(
    tables: Tables,
    edges: Integers,
    edge_bytes: Integers,
    sequence: Integers,
    starts: Integers,
    orders: Orders,
    result: Integers,
) -> None:
    """Merges a rank's ops with its transfers: those of one edge begin in the sequence, and end in it."""
    durations, held, peaks, lags = tables.durations_us, tables.held_bytes, tables.peak_bytes, tables.lags_us
    rank_of, first_on, count = tables.rank_of, tables.first_on, len(sequence)
    crossing = np.zeros(len(edges), np.int64)  # edges that cross the rank's border
    num_sent, num_arrived = np.zeros(len(edges), np.int64), np.zeros(len(edges), np.int64)  # transfers of each
    done = np.zeros(len(rank_of), np.int64)
    for r in range(len(result)):
        num_crossing = 0
        for e in range(len(edges)):
            source, target = rank_of[edges[e, 0]], rank_of[edges[e, 1]]
            if source != target and (source == r or target == r):
                crossing[num_crossing] = e
                num_crossing += 1
                num_sent[e] = num_arrived[e] = 0
        level, highest, i, runs = 0, 0, 0, False
        num_ops = count * (first_on[r + 1] - first_on[r])
        while True:
            first, key = -1, NEVER
            if i < num_ops:
                t = orders[r, i]
                m = sequence[done[t]]
                key = 4 * starts[m, t] + _OP
                if runs and durations[m, t] > 0:
                    key += 4 * durations[m, t] + _OP_ENDS - _OP
            for j in range(num_crossing):
                e = crossing[j]
                u = edges[e, 0]
                if num_sent[e] < count:
                    n = sequence[num_sent[e]]
                    sent = 4 * (starts[n, u] + durations[n, u]) + _TRANSFER_STARTS
                    if sent < key:
                        first, key = e, sent
                if rank_of[u] == r and num_arrived[e] < num_sent[e]:
                    n = sequence[num_arrived[e]]
                    arrived = 4 * (starts[n, u] + durations[n, u] + lags[n, e]) + _TRANSFER_ENDS
                    if arrived < key:
                        first, key = e, arrived
            if key == NEVER:
                break
            if first >= 0 and key % 4 == _TRANSFER_STARTS:
                level += edge_bytes[sequence[num_sent[first]], first]
                num_sent[first] += 1
            elif first >= 0:
                level -= edge_bytes[sequence[num_arrived[first]], first]
                num_arrived[first] += 1
            elif runs:
                level += min(held[m, t], 0) - peaks[m, t]
                for j in range(num_crossing):
                    if edges[crossing[j], 1] == t:
                        level -= edge_bytes[m, crossing[j]]
                done[t] += 1
                i, runs = i + 1, False
            else:
                level += max(held[m, t], 0) + peaks[m, t]
                runs = True
            highest = max(highest, level)
        result[r] = highest
