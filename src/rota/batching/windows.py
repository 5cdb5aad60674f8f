"""A lower bound for one sequence: time windows of ops, and per rank all ways to interleave its forwards and backwards.

    backwards done                     A state (i, j) of a rank: it has begun the step's first i forwards and first j
      2 │       · ▸ ·                  backwards. Memory allows states near the diagonal only. A way from (0, 0) to the
      1 │   · ▸ ▴   ▴                  far corner is the rank's order. `docs/variable-batches.md` has the proofs.
      0 · ▸ ▴
        └──────────── forwards done

To refute a makespan, each op gets a window from its earliest start to its latest end. Per rank, two dynamic programs
over the states find the earliest time of each state and the least time after it; ops keep only the starts that some
way through the states has room for. Windows of other ranks follow along edges, and so on, until one is empty or
nothing changes. This is destructive improvement (Klein and Scholl, "Computing lower bounds by destructive improvement",
1999) with a dynamic program instead of disjunctive arcs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rota.batching.bounds import turnarounds
from rota.batching.dispatching import NEVER
from rota.batching.problem import BatchProblem, Integers
from rota.compiled import inner, int64, loop

_MOST_ROUNDS = 8  # of windows, per makespan that is tried
_STATES_PER_BOUND = 2_000_000  # looked at, about 10 ns each
_FINENESS = 11  # binary digits: 0.05% more tells nobody anything


class _Step(NamedTuple):
    """The step with its micro-batches in the sequence."""

    durations_us: Integers  #: int64[num_tasks, num_microbatches]
    held_bytes: Integers  #: int64[num_tasks, num_microbatches]
    peak_bytes: Integers  #: int64[num_tasks, num_microbatches]
    lags_us: Integers  #: int64[num_edges, num_microbatches]
    turns: Integers  #: int64[num_ranks, num_microbatches]: the longest path from the end of a forward to its backward
    roles: Integers  #: int64[num_ranks, 3], as `BatchProblem.roles`
    first_in: Integers
    in_edge: Integers
    in_task: Integers
    rank_of: Integers  #: int64[num_tasks]
    limits_bytes: Integers  #: int64[num_ranks]
    tails_us: Integers  #: int64[num_ranks]


class _Windows(NamedTuple):
    """Bounds for the time before each op, and after it: int64[num_tasks, num_microbatches]."""

    heads: Integers
    outs: Integers


class _States(NamedTuple):
    """What is known of the states (i, j) of a rank, and of all ranks what they follow from."""

    lowest: Integers  #: int64[num_ranks, count + 1]: see `_lowest`
    earliest: Integers  #: the least time at which the state can be reached
    unfilled: Integers  #: the least of it that weight gradients cannot have used
    left: Integers  #: the least time from there to the end of the step


def sequence_bound_us(
    problem: BatchProblem, sequence: Integers, lowest_us: int, best_us: int, is_over: Callable[[], bool] = lambda: False
) -> int:
    """No plan of this sequence takes less. It is between `lowest_us`, a known bound, and `best_us`, a known makespan.

    Every rank has one stage (`problem.has_one_stage_per_rank`), and all tasks do the micro-batches in the sequence.

    Args:
        problem: The step.
        sequence: int64[num_microbatches].
        lowest_us: A bound that holds for this sequence.
        best_us: The makespan of a plan of this sequence.
        is_over: Asked before each makespan that is tried, whether there is no time for it.
    """
    tables = problem.tables
    columns = tables.durations_us, tables.held_bytes, tables.peak_bytes, tables.lags_us
    durations, held, peaks, lags = (np.ascontiguousarray(column[sequence].T) for column in columns)
    step = _Step(
        *(durations, held, peaks, lags),
        np.ascontiguousarray(turnarounds(tables, problem.roles)[:, sequence]),
        problem.roles,
        *(tables.first_in, tables.in_edge, tables.in_task, tables.rank_of),
        problem.limits_bytes,
        tables.tails_us,
    )
    outs = np.repeat(tables.tails_us[tables.rank_of][:, None], len(sequence), axis=1)
    windows = _Windows(np.zeros_like(step.durations_us), outs)
    low, high, spent = lowest_us - 1, best_us, 0
    while high - low > max(high >> _FINENESS, 1) and spent < _STATES_PER_BOUND and not is_over():
        target = (low + high) // 2
        tried = _Windows(windows.heads.copy(), windows.outs.copy())
        refuted, states = _refutes(step, tried, target)
        spent += states
        if refuted:
            low = target
        else:  # what holds for plans that meet the target holds for those that meet a lower one
            high, windows = target, tried
    return low + 1


@loop
def _refutes(step: _Step, windows: _Windows, target: int) -> tuple[bool, int]:
    """(whether no plan meets the target, states looked at); raises heads and tails to what holds if one does."""
    num_tasks, count = step.durations_us.shape
    num_ranks = len(step.limits_bytes)
    states = _States(
        np.zeros((num_ranks, count + 1), np.int64),
        np.zeros((count + 1, count + 1), np.int64),
        np.zeros((count + 1, count + 1), np.int64),
        np.zeros((count + 1, count + 1), np.int64),
    )
    num_states, spent, before = 0, 0, -1
    for r in range(num_ranks):
        num_states += _lowest(step, r, states.lowest[r])
    for _ in range(_MOST_ROUNDS):
        _follow(step, states.lowest, windows)
        for t in range(num_tasks):
            for k in range(count):
                if windows.heads[t, k] + step.durations_us[t, k] + windows.outs[t, k] > target:
                    return True, spent
        for r in range(num_ranks):
            if _interleave(step, r, states, windows, target):
                return True, spent + 2 * num_states
        spent += 2 * num_states
        after = int64(0)
        for t in range(num_tasks):
            for k in range(count):
                after += windows.heads[t, k] + windows.outs[t, k]
        if after == before:
            break
        before = after
    return False, spent


@inner
def _lowest(step: _Step, r: int, lowest: Integers) -> int:
    """lowest[i]: least backwards that must be over before the rank can hold the first i forwards. Counts the states."""
    held, peaks, limit = step.held_bytes, step.peak_bytes, step.limits_bytes[r]
    f, b, w = step.roles[r, 0], step.roles[r, 1], step.roles[r, 2]
    count = len(lowest) - 1
    level, freed, j, states = 0, 0, 0, 0
    for i in range(count):
        level += held[f, i]
        while j < i and level - freed + peaks[f, i] > limit:
            freed -= held[b, j] + (held[w, j] if w >= 0 else 0)
            j += 1
        lowest[i + 1] = j
        states += i + 2 - j
    return states


@inner
def _follow(step: _Step, lowest: Integers, windows: _Windows) -> None:
    """Heads and tails along edges, along the sequence, and from backwards to the forwards that need their memory."""
    durations, lags, roles, rank_of = step.durations_us, step.lags_us, step.roles, step.rank_of
    first_in, in_edge, in_task = step.first_in, step.in_edge, step.in_task
    heads, outs = windows
    num_tasks, count = durations.shape
    for k in range(count):
        for t in range(num_tasks):
            at = heads[t, k]
            if k > 0:
                at = max(at, heads[t, k - 1] + durations[t, k - 1])
            for i in range(first_in[t], first_in[t + 1]):
                u = in_task[i]
                at = max(at, heads[u, k] + durations[u, k] + lags[in_edge[i], k])
            r = rank_of[t]
            if t == roles[r, 0] and lowest[r, k + 1] > 0:
                b, j = roles[r, 1], lowest[r, k + 1] - 1
                at = max(at, heads[b, j] + durations[b, j])
            heads[t, k] = at
    for k in range(count - 1, -1, -1):
        for t in range(num_tasks - 1, -1, -1):
            after = outs[t, k]
            if k + 1 < count:
                after = max(after, outs[t, k + 1] + durations[t, k + 1])
            outs[t, k] = after
            r = rank_of[t]
            if t == roles[r, 0] and lowest[r, k + 1] > 0:
                b, j = roles[r, 1], lowest[r, k + 1] - 1
                outs[b, j] = max(outs[b, j], after + durations[t, k])
            for i in range(first_in[t], first_in[t + 1]):
                u = in_task[i]
                outs[u, k] = max(outs[u, k], after + durations[t, k] + lags[in_edge[i], k])


@inner
def _interleave(step: _Step, r: int, states: _States, windows: _Windows, target: int) -> bool:
    """Whether no way through a rank's states meets the target; if one does, its ops' heads and tails are raised."""
    durations, held, peaks = step.durations_us, step.held_bytes, step.peak_bytes
    limit, tail, lowest, turns = step.limits_bytes[r], step.tails_us[r], states.lowest[r], step.turns[r]
    earliest, unfilled, left = states.earliest, states.unfilled, states.left
    heads, outs = windows
    f, b, w = step.roles[r, 0], step.roles[r, 1], step.roles[r, 2]
    count = len(turns)
    weights = np.zeros(count + 1, np.int64)  # time and bytes of the first j weight gradients
    frees = np.zeros(count + 1, np.int64)
    level_f, level_b = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    work_f, work_b = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    for k in range(count):
        if w >= 0:
            weights[k + 1] = weights[k] + durations[w, k]
            frees[k + 1] = frees[k] - held[w, k]
        level_f[k + 1] = level_f[k] + held[f, k]
        level_b[k + 1] = level_b[k] + held[b, k]
        work_f[k + 1] = work_f[k] + durations[f, k]
        work_b[k + 1] = work_b[k] + durations[b, k]
    first_end = np.full(count, NEVER)  # of each forward
    for i in range(count + 1):
        for j in range(lowest[i], i + 1):
            at, spare = NEVER, NEVER
            if i == 0:
                at = spare = 0
            if i > 0 and j < i and j >= lowest[i - 1] and earliest[i - 1, j] < NEVER:
                k = i - 1
                must = level_f[k] + level_b[j] + held[f, k] + peaks[f, k] - limit
                start = max(earliest[k, j], heads[f, k])
                if w >= 0 and must > 0:
                    start = max(start, unfilled[k, j] + _least(frees, weights, must, j))
                if must - frees[j] <= 0 and start + durations[f, k] + outs[f, k] <= target:
                    at = start + durations[f, k]
                    spare = max(unfilled[k, j], start - weights[j]) + durations[f, k]
                    first_end[k] = min(first_end[k], at)
            if j > lowest[i] and earliest[i, j - 1] < NEVER:
                k = j - 1
                must = level_f[i] + level_b[k] + max(held[b, k], 0) + peaks[b, k] - limit
                start = max(earliest[i, k], heads[b, k], first_end[k] + turns[k])
                if w >= 0 and must > 0:
                    start = max(start, unfilled[i, k] + _least(frees, weights, must, k))
                if must - frees[k] <= 0 and start + durations[b, k] + outs[b, k] <= target:
                    at = min(at, start + durations[b, k])
                    spare = min(spare, max(unfilled[i, k], start - weights[k]) + durations[b, k])
            if at < NEVER:
                rest = work_f[count] - work_f[i] + work_b[count] - work_b[j] + weights[count]
                if spare + rest + tail > target:
                    at = NEVER
            earliest[i, j], unfilled[i, j] = at, spare
    if earliest[count, count] == NEVER:
        return True
    start_f, start_b = np.full(count, NEVER), np.full(count, NEVER)
    after_f, after_b = np.full(count, NEVER), np.full(count, NEVER)
    for i in range(count, -1, -1):
        for j in range(i, lowest[i] - 1, -1):
            least = NEVER
            if i == count and j == count:
                least = tail
            if i < count and j >= lowest[i + 1] and left[i + 1, j] < NEVER and earliest[i, j] < NEVER:
                must = level_f[i] + level_b[j] + held[f, i] + peaks[f, i] - limit
                start = max(earliest[i, j], heads[f, i])
                if w >= 0 and must > 0:
                    start = max(start, unfilled[i, j] + _least(frees, weights, must, j))
                after = max(left[i + 1, j], outs[f, i], after_b[i] + durations[b, i] + turns[i])
                if must - frees[j] <= 0 and start + durations[f, i] + after <= target:
                    least = after + durations[f, i]
                    start_f[i], after_f[i] = min(start_f[i], start), min(after_f[i], after)
            if j < i and left[i, j + 1] < NEVER and earliest[i, j] < NEVER:
                must = level_f[i] + level_b[j] + max(held[b, j], 0) + peaks[b, j] - limit
                start = max(earliest[i, j], heads[b, j], first_end[j] + turns[j])
                if w >= 0 and must > 0:
                    start = max(start, unfilled[i, j] + _least(frees, weights, must, j))
                after = max(left[i, j + 1], outs[b, j], tail + weights[count] - weights[j])
                if must - frees[j] <= 0 and start + durations[b, j] + after <= target:
                    least = min(least, after + durations[b, j])
                    start_b[j], after_b[j] = min(start_b[j], start), min(after_b[j], after)
            left[i, j] = least if earliest[i, j] < NEVER else NEVER
    for k in range(count):
        if start_f[k] == NEVER or start_b[k] == NEVER:
            return True
        heads[f, k], heads[b, k] = max(heads[f, k], start_f[k]), max(heads[b, k], start_b[k])
        outs[f, k], outs[b, k] = max(outs[f, k], after_f[k]), max(outs[b, k], after_b[k])
    return False


@inner
def _least(frees: Integers, weights: Integers, must: int, most: int) -> int:
    """The least time of weight gradients that free `must` bytes, of the first `most`; all of these if they do not."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if frees[middle] >= must:
            high = middle
        else:
            low = middle + 1
    return weights[low]
