"""Lower bounds for a grouping, whatever the sequence: work, the longest way, memory over time, and turnarounds.

`docs/variable-batches.md` has the proofs. The bound of one sequence is `rota.batching.windows`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rota.batching.problem import NO_LIMIT, BatchProblem, Integers

#: What a bound is a bound of.
ALL_ORDERS = "all orders of this grouping"
ANY_SEQUENCE = "all plans of this grouping with one sequence of micro-batches on all ranks"
THIS_SEQUENCE = "all plans of this grouping with this sequence of micro-batches on all ranks"

_MOST_TURNAROUNDS = 16  # micro-batches that are looked at, those that hold most


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
    heads, tails = _ways(problem)
    longest = int((heads + problem.durations_us + tails).max())
    bounds = [BatchBound(longest, ALL_ORDERS, "the longest way of one micro-batch")]
    turns = _turns(problem) if problem.has_one_stage_per_rank else None
    for rank in range(problem.num_ranks):
        own = np.flatnonzero(problem.rank_of == rank)
        if not len(own):
            continue
        before, after = int(heads[:, own].min()), int(tails[:, own].min())
        work = before + int(problem.durations_us[:, own].sum()) + after
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
    heads, tails = _ways(problem)
    turns = _turns(problem)
    bounds = []
    for rank in np.flatnonzero(problem.limits_bytes < NO_LIMIT).tolist():
        own = problem.roles[rank, :2]
        work = int(heads[:, own].min() + problem.durations_us[:, own].sum() + tails[:, own].min())
        why = f"on rank {rank} memory has too little room beside large micro-batches to work until they come back"
        bounds.append(BatchBound(work + _lost_us(problem, rank, turns[rank]), ANY_SEQUENCE, why))
    return bounds


def _ways(problem: BatchProblem) -> tuple[Integers, Integers]:
    """(heads, tails) of each op along its micro-batch's own way: int64[num_microbatches, num_tasks]."""
    heads = np.zeros_like(problem.durations_us)
    tails = np.tile(problem.tails_us[problem.rank_of], (problem.num_microbatches, 1))
    by_target = np.argsort(problem.edges[:, 1], kind="stable").tolist()
    by_source = np.argsort(-problem.edges[:, 0], kind="stable").tolist()
    durations = problem.durations_us
    for e in by_target:
        a, b = problem.edges[e]
        heads[:, b] = np.maximum(heads[:, b], heads[:, a] + durations[:, a] + problem.lags_us[:, e])
    for e in by_source:
        a, b = problem.edges[e]
        tails[:, a] = np.maximum(tails[:, a], tails[:, b] + durations[:, b] + problem.lags_us[:, e])
    return heads, tails


def _turns(problem: BatchProblem) -> Integers:
    """int64[num_ranks, num_microbatches]: the longest way from the end of each rank's F to its B or I."""
    forwards, backwards, ranks = problem.roles[:, 0], problem.roles[:, 1], np.arange(problem.num_ranks)
    far = np.full((problem.num_ranks, *problem.durations_us.shape), -NO_LIMIT)  # to the end of each task
    far[ranks, :, forwards] = 0
    for e in np.argsort(problem.edges[:, 1], kind="stable").tolist():
        a, b = problem.edges[e].tolist()
        np.maximum(far[:, :, b], far[:, :, a] + problem.lags_us[:, e] + problem.durations_us[:, b], out=far[:, :, b])
    return np.maximum(far[ranks, :, backwards] - problem.durations_us.T[backwards], 0)


def _area_us(problem: BatchProblem, rank: int, turns: Integers) -> int:
    """Bytes times µs that all micro-batches hold at least on a rank, over its limit."""
    forward, backward, weight = problem.roles[rank].tolist()
    durations, held, peaks = problem.durations_us, problem.held_bytes, problem.peak_bytes
    until_backward = durations[:, forward] + turns + durations[:, backward]
    area = int(np.maximum(held[:, forward], 0).astype(object) @ until_backward)
    own = [forward, backward]
    if weight >= 0:
        left = np.maximum(held[:, forward] + held[:, backward], 0)
        area += int(left.astype(object) @ durations[:, weight])
        own.append(weight)
    area += sum(int(peaks[:, task].astype(object) @ durations[:, task]) for task in own)
    return -(-area // max(int(problem.limits_bytes[rank]), 1))


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
