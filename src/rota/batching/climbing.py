"""Local search over the sequence of micro-batches and the orders of ranks; each try is timed by one replay.

Some tries exchange micro-batches in the sequence, or put one elsewhere: the ranks' orders stay, whose k-th F is that of
the k-th micro-batch. The others move an op of the critical path to another place on its rank, as in Nowicki and
Smutnicki, "A Fast Taboo Search Algorithm for the Job Shop Problem", 1996: while that path stays, nothing gets faster,
and it stays if ops only change places within one of its *blocks*, which are on one rank. So most of these moves are at
the *borders* of blocks, where a rank has waited for another one. What makes nothing longer is kept.

A replay begins at the first op that a move may change. It ends as soon as a rank's work no longer fits before the best
makespan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rota.batching.dispatching import Dispatch
from rota.batching.problem import BatchProblem, Integers, Orders, Tables
from rota.batching.replaying import fits, replay, replay_since
from rota.compiled import copy_rows, inner, int64, loop

_FARTHEST = 6  # places that an op is moved by
_OPS_PER_CALL = 200_000  # timed between two looks at the clock, some ms
_OPS_PER_TRY = 50  # that take as long as what a try takes besides its replay


class _Step(NamedTuple):
    """A sequence, the ranks' orders, and their times."""

    sequence: Integers  #: int64[num_microbatches]
    orders: Orders
    starts: Integers  #: int64[num_microbatches, num_tasks]


class _Index(NamedTuple):
    """Where the ops of a step are, and its critical path."""

    nth: Integers  #: as `orders`: how many ops of its task come before each place
    places: Integers  #: int64[num_microbatches, num_tasks]: where in its rank's order each task's k-th op is
    path: Integers  #: int64[num_ops, 2]: (rank, place in its order) of critical ops, the last one first
    borders: Integers  #: int64[num_ops]: entries of `path` that begin when an op of another rank, the next one, ends


def climb(
    problem: BatchProblem,
    sequence: Integers,
    dispatch: Dispatch,
    goal_us: int,
    tries: int,
    most_ops: int = 1 << 60,
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[Integers, Dispatch]:
    """The best sequence and orders after so many tries.

    It ends earlier when one reaches `goal_us`, after about `most_ops` ops of replays, or when `is_over` says so; apart
    from that, it is repeatable.
    """
    best = _Step(sequence.copy(), dispatch.orders.copy(), np.zeros_like(dispatch.starts_us))
    dice = np.array([88172645463325252], np.uint64)
    best_us = dispatch.makespan_us
    while tries > 0 and most_ops > 0 and best_us > goal_us and not is_over():
        ops = min(most_ops, _OPS_PER_CALL)
        best_us, tried, timed = _climb(problem.tables, problem.limits_bytes, best, goal_us, tries, ops, dice)
        tries, most_ops = tries - tried, most_ops - timed
    best_us = replay(problem.tables, best.sequence, best.orders, best.starts, 1 << 60)
    return best.sequence, Dispatch(best_us, best.starts, best.orders)


@loop
def _climb(
    tables: Tables, limits: Integers, kept: _Step, goal: int, tries: int, most_ops: int, state: NDArray[np.uint64]
) -> tuple[int, int, int]:
    """(makespan, tries made, ops timed); `kept` ends as the best, `state` is that of the dice."""
    durations, first_on = tables.durations_us, tables.first_on
    sequence, orders, kept_starts = kept
    count, num_tasks = durations.shape
    num_ops = count * num_tasks
    nth, places = np.zeros(orders.shape, np.int64), np.zeros((count, num_tasks), np.int64)
    path, borders = np.zeros((num_ops, 2), np.int64), np.zeros(num_ops, np.int64)
    index = _Index(nth, places, path, borders)
    work = np.zeros((num_tasks, count + 1), np.int64)
    best = replay(tables, sequence, orders, kept_starts, 1 << 60)
    starts = kept_starts.copy()
    for r in range(len(orders)):
        _number(tables, orders, r, nth, places)
    _add_up(durations, sequence, work)
    length, num_borders = _critical(tables, kept, index)
    tried, timed = 0, num_ops
    dice = state[0]
    while tried < tries and timed < most_ops and best > goal:
        tried += 1
        timed += _OPS_PER_TRY
        dice ^= dice << np.uint64(13)
        dice ^= dice >> np.uint64(7)
        dice ^= dice << np.uint64(17)
        rest = int64(dice >> np.uint64(20))
        move, rest = rest % 8, rest // 8
        row = -1
        if move < 3:
            a, b = rest % count, rest // count % count
            if move == 0:
                b = (a + 1 + b % 4) % count
            if a == b:
                continue
            first = min(a, b)
            since = kept_starts[sequence[first], 0]
            for t in range(1, num_tasks):
                since = min(since, kept_starts[sequence[first], t])
        else:
            far, rest = 1 + rest % _FARTHEST, rest // _FARTHEST
            way, rest = rest % 4, rest // 4
            if move == 3 or num_borders == 0:
                at = rest % length
                row, a = path[at, 0], path[at, 1]
                b = a + far if way < 2 else a - far
            else:
                at = borders[rest % num_borders]
                if way < 2:  # the op that waits: one behind it goes first, or it goes back
                    row, a = path[at, 0], path[at, 1]
                    b = a + far
                    if way == 0:
                        a, b = b, a
                else:  # the op that is waited for: it goes first, or one before it goes behind it
                    row, a = path[at + 1, 0], path[at + 1, 1]
                    b = a - far
                    if way == 2:
                        a, b = b, a
            last = count * (first_on[row + 1] - first_on[row]) - 1
            if not (0 <= a <= last and 0 <= b <= last) or orders[row, a] == orders[row, b]:
                continue
            first = min(a, b)
            since = 0
            if first > 0:
                t = orders[row, first - 1]
                m = sequence[nth[row, first - 1]]
                since = kept_starts[m, t] + durations[m, t]
        _move(sequence, orders, move, row, a, b)
        value = best + 1
        if fits(tables, limits, sequence, orders, row):
            value = replay_since(tables, sequence, orders, starts, work, since, best)
            timed += num_ops
        if value <= best:
            best = value
            timed += num_ops  # what follows takes about as long
            copy_rows(starts, kept_starts)
            if row >= 0:
                _number(tables, orders, row, nth, places)
            else:
                _add_up(durations, sequence, work)
            length, num_borders = _critical(tables, kept, index)
        else:
            copy_rows(kept_starts, starts)
            _move(sequence, orders, move, row, b, a)
    state[0] = dice
    return best, tried, timed


@inner
def _move(sequence: Integers, orders: Orders, move: int, row: int, a: int, b: int) -> None:
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


@inner
def _number(tables: Tables, orders: Orders, r: int, nth: Integers, places: Integers) -> None:
    """For a rank, nth[r, i] is how many ops of its task come before place i; places[k, t] is where the k-th one is."""
    count, num_tasks = places.shape
    done = np.zeros(num_tasks, np.int64)
    for i in range(count * (tables.first_on[r + 1] - tables.first_on[r])):
        t = orders[r, i]
        nth[r, i] = done[t]
        places[done[t], t] = i
        done[t] += 1


@inner
def _add_up(durations: Integers, sequence: Integers, work: Integers) -> None:
    """Fills work[t, k] with the time of the first k ops of each task."""
    for k in range(len(sequence)):
        for t in range(len(work)):
            work[t, k + 1] = work[t, k] + durations[sequence[k], t]


@inner
def _critical(tables: Tables, step: _Step, index: _Index) -> tuple[int, int]:
    """Fills `path` and `borders` of the index, and returns the numbers of both."""
    sequence, orders, starts = step
    nth, places, path, borders = index
    durations, lags, first_in, first_on = tables.durations_us, tables.lags_us, tables.first_in, tables.first_on
    count = len(sequence)
    latest, r, i = -1, 0, 0
    for q in range(len(orders)):
        last = count * (first_on[q + 1] - first_on[q]) - 1
        if last >= 0:
            t = orders[q, last]
            m = sequence[nth[q, last]]
            end = starts[m, t] + durations[m, t] + tables.tails_us[q]
            if end > latest:
                latest, r, i = end, q, last
    length, num_borders = 0, 0
    while True:
        path[length, 0], path[length, 1] = r, i
        length += 1
        t, k = orders[r, i], nth[r, i]
        m = sequence[k]
        begin = starts[m, t]
        if i > 0:
            u, n = orders[r, i - 1], sequence[nth[r, i - 1]]
            if starts[n, u] + durations[n, u] == begin:
                i -= 1
                continue
        follows = False
        for j in range(first_in[t], first_in[t + 1]):
            u = tables.in_task[j]
            if starts[m, u] + durations[m, u] + lags[m, tables.in_edge[j]] == begin:
                if tables.rank_of[u] != r:
                    borders[num_borders] = length - 1
                    num_borders += 1
                r, i, follows = tables.rank_of[u], places[k, u], True
                break
        if not follows:
            return length, num_borders
