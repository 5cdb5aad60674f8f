"""Local search over the sequence of micro-batches and the orders of ranks; each try is timed by one replay.

Half of the tries exchange micro-batches in the sequence, or put one elsewhere: the ranks' orders stay, whose k-th F is
that of the k-th micro-batch. The others move an op of the critical path to another place on its rank, as in Nowicki and
Smutnicki, "A Fast Taboo Search Algorithm for the Job Shop Problem", 1996: while that path stays, nothing gets faster.
What makes nothing longer is kept.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from rota.batching.dispatching import Dispatch
from rota.batching.problem import BatchProblem, Integers
from rota.batching.replaying import fits, replay

_FARTHEST = 6  # places that an op is moved by


def climb(
    problem: BatchProblem, sequence: Integers, given: Dispatch, goal_us: int, tries: int
) -> tuple[Integers, Dispatch]:
    """The best sequence and orders after so many tries, or the first that reach `goal_us`; repeatable."""
    sequence, orders = sequence.copy(), given.orders.copy()
    starts = np.zeros_like(given.starts_us)
    best_us = _climb(problem.tables, problem.limits_bytes, sequence, orders, starts, goal_us, tries)
    return sequence, Dispatch(int(best_us), starts, orders)


@njit(cache=True, nogil=True)
def _climb(tables, limits, sequence, orders, starts, goal, tries):  # type: ignore[no-untyped-def]
    """The makespan of the best; the arrays end as it."""
    count, first_on = len(sequence), tables.first_on
    places = np.zeros_like(starts)
    path = np.zeros((starts.size, 2), np.int64)
    best = replay(tables, sequence, orders, starts, 1 << 60)
    length = _critical(tables, sequence, orders, starts, places, path)
    state = np.uint64(88172645463325252)
    for _ in range(tries):
        if best <= goal:
            break
        state ^= state << np.uint64(13)
        state ^= state >> np.uint64(7)
        state ^= state << np.uint64(17)
        dice = np.int64(state >> np.uint64(20))
        move, dice = dice % 6, dice // 6
        row = -1
        if move < 3:
            a, b = dice % count, dice // count % count
            if move == 0:
                b = (a + 1 + b % 4) % count
        else:
            at, dice = dice % length, dice // length
            row, a = path[at, 0], path[at, 1]
            far = 1 + dice % _FARTHEST
            b = a + far if dice // _FARTHEST % 2 else a - far
            last = count * (first_on[row + 1] - first_on[row]) - 1
            if not 0 <= b <= last or orders[row, a] == orders[row, b]:
                continue
        _move(sequence, orders, move, row, a, b)
        value = best + 1
        if fits(tables, limits, sequence, orders, row):
            value = replay(tables, sequence, orders, starts, best)
        if value <= best:
            best = value
            length = _critical(tables, sequence, orders, starts, places, path)
        else:
            _move(sequence, orders, move, row, b, a)
    return replay(tables, sequence, orders, starts, 1 << 60)


@njit(cache=True, nogil=True)
def _move(sequence, orders, move, row, a, b):  # type: ignore[no-untyped-def]
    """Exchanges two micro-batches (0, 1), or takes one (2) or an op of a rank (3 and above) from place a to b."""
    if move < 2:
        sequence[a], sequence[b] = sequence[b], sequence[a]
        return
    step = 1 if a < b else -1
    if row < 0:
        taken = sequence[a]
        for i in range(a, b, step):
            sequence[i] = sequence[i + step]
        sequence[b] = taken
    else:
        task = orders[row, a]
        for i in range(a, b, step):
            orders[row, i] = orders[row, i + step]
        orders[row, b] = task


@njit(cache=True, nogil=True)
def _critical(tables, sequence, orders, starts, places, path):  # type: ignore[no-untyped-def]
    """Fills `path` with (rank, place in its order) of ops that make the step as long as it is; returns how many."""
    durations, lags, first_in, first_on = tables.durations_us, tables.lags_us, tables.first_in, tables.first_on
    count = len(sequence)
    done = np.zeros(durations.shape[1], np.int64)
    latest, r, i, k = -1, 0, 0, 0
    for q in range(len(orders)):
        last = count * (first_on[q + 1] - first_on[q])
        for j in range(last):
            t = orders[q, j]
            places[done[t], t] = j  # of the task's k-th op
            done[t] += 1
        if last:
            t = orders[q, last - 1]
            m = sequence[count - 1]
            end = starts[m, t] + durations[m, t] + tables.tails_us[q]
            if end > latest:
                latest, r, i, k = end, q, last - 1, count - 1
    length, t = 0, orders[r, i]
    while True:
        path[length, 0], path[length, 1] = r, i
        length += 1
        begin = starts[sequence[k], t]
        if i > 0:
            u = orders[r, i - 1]
            low, high = 0, count - 1
            while low < high:
                middle = (low + high) // 2
                if places[middle, u] >= i - 1:
                    high = middle
                else:
                    low = middle + 1
            m = sequence[low]
            if starts[m, u] + durations[m, u] == begin:
                t, k, i = u, low, i - 1
                continue
        m, follows = sequence[k], False
        for j in range(first_in[t], first_in[t + 1]):
            u = tables.in_task[j]
            if starts[m, u] + durations[m, u] + lags[m, tables.in_edge[j]] == begin:
                t, r, follows = u, tables.rank_of[u], True
                i = places[k, t]
                break
        if not follows:
            return length
