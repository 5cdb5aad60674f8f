"""Lower bounds for a grouping, whatever the sequence: work, the longest path, memory over time, and turnarounds.

`docs/variable-batches.md` has the proofs. The bound of one sequence is `rota.batching.windows`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rota.batching.problem import NO_LIMIT, BatchProblem, Integers, Tables
from rota.compiled import loop

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
        us: The bound in µs, for all plans in `among`.
        among: The plans that it holds for.
        why: The reason, as one line of text.
    """

    us: int
    among: str
    why: str


def of_grouping(problem: BatchProblem) -> list[BatchBound]:
    """The bounds for all orders."""
    tables = problem.tables
    heads, tails = _longest_paths(tables)
    longest = int((heads + problem.durations_us + tails).max())
    bounds = [BatchBound(longest, ALL_ORDERS, "the longest path of one micro-batch")]
    before, after = np.full((2, problem.num_ranks), NO_LIMIT)
    np.minimum.at(before, problem.rank_of, heads.min(axis=0))
    np.minimum.at(after, problem.rank_of, tails.min(axis=0))
    around = before + after
    works = around + tables.loads_us - tables.tails_us
    areas = around + _areas_us(problem, turnarounds(tables, problem.roles)) if problem.has_one_stage_per_rank else None
    for rank in np.flatnonzero(np.bincount(problem.rank_of, minlength=problem.num_ranks)).tolist():
        why = f"the work of rank {rank}, what comes before it and after it"
        bounds.append(BatchBound(int(works[rank]), ALL_ORDERS, why))
        if problem.limits_bytes[rank] < NO_LIMIT and areas is not None:
            why = f"what micro-batches hold on rank {rank} over time, in its limit"
            bounds.append(BatchBound(int(areas[rank]), ALL_ORDERS, why))
    return bounds


def of_any_sequence(problem: BatchProblem) -> list[BatchBound]:
    """Bounds for plans in which all tasks do the micro-batches in the same sequence, whichever it is."""
    if not problem.has_one_stage_per_rank or (problem.roles[:, 2] >= 0).any():
        return []  # weight gradients fill the time of turnarounds
    heads, tails = _longest_paths(problem.tables)
    turns = turnarounds(problem.tables, problem.roles)
    bounds = []
    for rank in np.flatnonzero(problem.limits_bytes < NO_LIMIT).tolist():
        tasks = problem.roles[rank, :2]
        work = int(heads[:, tasks].min() + problem.durations_us[:, tasks].sum() + tails[:, tasks].min())
        why = f"on rank {rank} memory has too little room beside large micro-batches to work until they come back"
        bounds.append(BatchBound(work + _lost_us(problem, rank, turns[rank]), ANY_SEQUENCE, why))
    return bounds


@loop
def _longest_paths(tables: Tables) -> tuple[Integers, Integers]:
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


@loop
def turnarounds(tables: Tables, roles: Integers) -> Integers:
    """int64[num_ranks, num_microbatches]: the longest path from the end of each rank's F to its B or I."""
    durations, lags, first_in, in_task = tables.durations_us, tables.lags_us, tables.first_in, tables.in_task
    count, num_tasks = durations.shape
    turns = np.zeros((len(roles), count), np.int64)
    far = np.zeros(num_tasks, np.int64)  # to the end of the task; -1 if no path leads there
    for r in range(len(roles)):
        forward, backward = roles[r, 0], roles[r, 1]
        for m in range(count):
            for t in range(num_tasks):
                far[t] = -1
            far[forward] = 0
            for t in range(forward + 1, backward + 1):
                for j in range(first_in[t], first_in[t + 1]):
                    if far[in_task[j]] >= 0:
                        path = far[in_task[j]] + lags[m, tables.in_edge[j]] + durations[m, t]
                        far[t] = max(far[t], path)
            turns[r, m] = max(far[backward] - durations[m, backward], 0)
    return turns


def _areas_us(problem: BatchProblem, turns: Integers) -> Integers:
    """int64[num_ranks]: bytes times µs that all micro-batches hold at least on a rank, over its limit."""
    durations = problem.durations_us.astype(np.float64)  # products of bytes and µs may be larger than int64
    held = problem.held_bytes
    forwards, backwards, weights = problem.roles.T
    until_backward = durations[:, forwards] + turns.T + durations[:, backwards]
    areas = (np.maximum(held[:, forwards], 0) * until_backward).sum(axis=0)
    if problem.has_weights:
        split = weights >= 0
        left = np.maximum(held[:, forwards] + held[:, backwards], 0)
        areas += np.where(split, (left * durations[:, weights]).sum(axis=0), 0.0)
    np.add.at(areas, problem.rank_of, (problem.peak_bytes * durations).sum(axis=0))
    bounds: Integers = np.ceil(areas * (1 - _ROUNDING) / np.maximum(problem.limits_bytes, 1)).astype(np.int64)
    return bounds


def _lost_us(problem: BatchProblem, rank: int, turns: Integers) -> int:
    """Idle time of a rank between F and B of a large micro-batch; of several, where no two are in flight at once."""
    forward, backward, _ = problem.roles[rank].tolist()
    held = np.maximum(problem.held_bytes[:, forward], 0)
    limit, idle = int(problem.limits_bytes[rank]), turns.copy()
    largest = np.argsort(-held, kind="stable")[:_MOST_TURNAROUNDS]
    for task in (forward, backward):
        values = problem.durations_us[:, task]
        order = np.argsort(-(values / np.maximum(held, 1)), kind="stable")
        idle[largest] -= _knapsacks(values, held, order, largest, limit)
    idle = np.maximum(idle[largest], 0)
    return int(max(idle[2 * held[largest] > limit].sum(), idle.max()))


@loop
def _knapsacks(values: Integers, weights: Integers, order: Integers, chosen: Integers, limit: int) -> Integers:
    """For each chosen one, at least the largest sum of values of others whose weights fit beside it within a limit.

    `order` has those first whose values are highest for their weights. The last one is taken in part.
    """
    totals = np.zeros(len(chosen), np.int64)
    for i in range(len(chosen)):
        room = limit - weights[chosen[i]]
        for other in order:
            if other == chosen[i]:
                continue
            if weights[other] > room:
                totals[i] += int(np.ceil(values[other] * (max(room, 0) / weights[other]) * (1 + _ROUNDING)))
                break
            room -= weights[other]
            totals[i] += values[other]
    return totals
