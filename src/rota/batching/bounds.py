"""Lower bounds for a grouping, whatever the sequence: work, the longest way, memory over time, and turnarounds.

`docs/variable-batches.md` has the proofs. The bound of one sequence is `rota.batching.windows`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numba import njit

from rota.batching.problem import NO_LIMIT, BatchProblem, Integers

#: What a bound is a bound of.
ALL_ORDERS = "all orders of this grouping"
ANY_SEQUENCE = "all plans of this grouping with one sequence of micro-batches on all ranks"
THIS_SEQUENCE = "all plans of this grouping with this sequence of micro-batches on all ranks"

_MOST_TURNAROUNDS = 16  # micro-batches that are looked at, those that hold most
_ROUNDING = 1e-9  # more than all rounding errors of a sum of floats together


@dataclass(frozen=True, slots=True)
class BatchBound:
    """A lower bound.

    Attributes:
        us: No plan among `among` takes less time, in µs.
        among: The plans that it holds for.
        why: The reason, as one line of text.
    """

    us: int
    among: str
    why: str


def of_grouping(problem: BatchProblem) -> list[BatchBound]:
    """The bounds for all orders."""
    tables = problem.tables
    heads, tails = _ways(tables)
    longest = int((heads + problem.durations_us + tails).max())
    bounds = [BatchBound(longest, ALL_ORDERS, "the longest way of one micro-batch")]
    turns = _turns(tables, problem.roles) if problem.has_one_stage_per_rank else None
    firsts, lasts = heads.min(axis=0), tails.min(axis=0)
    works = tables.loads_us - tables.tails_us
    for rank in range(problem.num_ranks):
        own = problem.rank_of == rank
        if not own.any():
            continue
        before, after = int(firsts[own].min()), int(lasts[own].min())
        work = before + int(works[rank]) + after
        bounds.append(BatchBound(work, ALL_ORDERS, f"the work of rank {rank}, what comes before it and after it"))
        if problem.limits_bytes[rank] < NO_LIMIT and turns is not None:
            us = before + _area_us(problem, rank, turns[rank]) + after
            why = f"what micro-batches hold on rank {rank} over time, in its limit"
            bounds.append(BatchBound(us, ALL_ORDERS, why))
    return bounds


def of_any_sequence(problem: BatchProblem) -> list[BatchBound]:
    """Bounds for plans in which all tasks do the micro-batches in the same sequence, whichever it is."""
    if not problem.has_one_stage_per_rank or (problem.roles[:, 2] >= 0).any():
        return []  # weight gradients fill the time of turnarounds
    heads, tails = _ways(problem.tables)
    turns = _turns(problem.tables, problem.roles)
    bounds = []
    for rank in np.flatnonzero(problem.limits_bytes < NO_LIMIT).tolist():
        own = problem.roles[rank, :2]
        work = int(heads[:, own].min() + problem.durations_us[:, own].sum() + tails[:, own].min())
        why = f"on rank {rank} memory has too little room beside large micro-batches to work until they come back"
        bounds.append(BatchBound(work + _lost_us(problem, rank, turns[rank]), ANY_SEQUENCE, why))
    return bounds


@njit(cache=True, nogil=True)
def _ways(tables):  # type: ignore[no-untyped-def]
    """(heads, tails) of each op along its micro-batch's own way: int64[num_microbatches, num_tasks]."""
    durations, lags, first_in, in_task = tables.durations_us, tables.lags_us, tables.first_in, tables.in_task
    count, num_tasks = durations.shape
    heads, tails = np.zeros_like(durations), np.zeros_like(durations)
    for m in range(count):
        for t in range(num_tasks):
            tails[m, t] = tables.tails_us[tables.rank_of[t]]
            for j in range(first_in[t], first_in[t + 1]):
                u = in_task[j]
                heads[m, t] = max(heads[m, t], heads[m, u] + durations[m, u] + lags[m, tables.in_edge[j]])
        for t in range(num_tasks - 1, -1, -1):
            for j in range(first_in[t], first_in[t + 1]):
                u = in_task[j]
                tails[m, u] = max(tails[m, u], tails[m, t] + durations[m, t] + lags[m, tables.in_edge[j]])
    return heads, tails


@njit(cache=True, nogil=True)
def _turns(tables, roles):  # type: ignore[no-untyped-def]
    """int64[num_ranks, num_microbatches]: the longest way from the end of each rank's F to its B or I."""
    durations, lags, first_in, in_task = tables.durations_us, tables.lags_us, tables.first_in, tables.in_task
    count, num_tasks = durations.shape
    turns = np.zeros((len(roles), count), np.int64)
    far = np.zeros(num_tasks, np.int64)  # to the end of the task; -1 if there is no way
    for r in range(len(roles)):
        forward, backward = roles[r, 0], roles[r, 1]
        for m in range(count):
            far[:] = -1
            far[forward] = 0
            for t in range(forward + 1, backward + 1):
                for j in range(first_in[t], first_in[t + 1]):
                    if far[in_task[j]] >= 0:
                        way = far[in_task[j]] + lags[m, tables.in_edge[j]] + durations[m, t]
                        far[t] = max(far[t], way)
            turns[r, m] = max(far[backward] - durations[m, backward], 0)
    return turns


def _area_us(problem: BatchProblem, rank: int, turns: Integers) -> int:
    """Bytes times µs that all micro-batches hold at least on a rank, over its limit."""
    forward, backward, weight = problem.roles[rank].tolist()
    durations = problem.durations_us.astype(np.float64)  # products of bytes and µs may be larger than int64
    held, peaks = problem.held_bytes, problem.peak_bytes
    until_backward = durations[:, forward] + turns + durations[:, backward]
    area = np.maximum(held[:, forward], 0) @ until_backward
    own = [forward, backward]
    if weight >= 0:
        area += np.maximum(held[:, forward] + held[:, backward], 0) @ durations[:, weight]
        own.append(weight)
    area += (peaks[:, own] * durations[:, own]).sum()
    return math.ceil(area * (1 - _ROUNDING) / max(int(problem.limits_bytes[rank]), 1))


def _lost_us(problem: BatchProblem, rank: int, turns: Integers) -> int:
    """Idle time of a rank between F and B of a large micro-batch; of several, where no two are in flight at once."""
    forward, backward, _ = problem.roles[rank].tolist()
    durations, held = problem.durations_us, problem.held_bytes[:, forward]
    limit, idle = int(problem.limits_bytes[rank]), np.zeros(problem.num_microbatches, np.int64)
    for m in np.argsort(-held, kind="stable")[:_MOST_TURNAROUNDS].tolist():
        others, room = np.arange(problem.num_microbatches) != m, limit - int(held[m])
        fits = sum(_knapsack(durations[others, task], held[others], room) for task in (forward, backward))
        idle[m] = max(int(turns[m]) - fits, 0)
    return max(int(idle[2 * held > limit].sum()), int(idle.max()))


def _knapsack(values: Integers, weights: Integers, room: int) -> int:
    """At least the largest sum of values whose weights fit: the last one is taken in part."""
    order = np.argsort(-(values / np.maximum(weights, 1)), kind="stable")
    values, weights = values[order], weights[order]
    filled = np.cumsum(weights)
    whole = int(np.searchsorted(filled, room, side="right"))
    total = int(values[:whole].sum())
    if whole == len(values):
        return total
    left = max(room - (int(filled[whole - 1]) if whole else 0), 0)
    return total + -(-int(values[whole]) * left // int(weights[whole]))
