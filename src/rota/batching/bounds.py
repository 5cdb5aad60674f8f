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
    """The bounds that need no sequence."""
    heads, tails = _ways(problem)
    longest = int((heads + problem.durations_us + tails).max())
    bounds = [BatchBound(longest, ALL_ORDERS, "the longest way of one micro-batch")]
    for rank in range(problem.num_ranks):
        own = np.flatnonzero(problem.rank_of == rank)
        if not len(own):
            continue
        before, after = int(heads[:, own].min()), int(tails[:, own].min())
        work = before + int(problem.durations_us[:, own].sum()) + after
        bounds.append(BatchBound(work, ALL_ORDERS, f"the work of rank {rank}, what comes before it and after it"))
        if problem.limits_bytes[rank] < NO_LIMIT and problem.has_one_stage_per_rank:
            bounds.append(_area(problem, rank, before, after))
            bounds.append(_turnaround(problem, rank, work))
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


def _turns(problem: BatchProblem, rank: int) -> Integers:
    """int64[num_microbatches]: the longest way from the end of the rank's F to its B or I."""
    forward, backward, _ = problem.roles[rank].tolist()
    far = np.full(problem.durations_us.shape, -1)
    far[:, forward] = 0
    for e in np.argsort(problem.edges[:, 1], kind="stable").tolist():
        a, b = problem.edges[e].tolist()
        if forward <= a and b <= backward:
            own = 0 if b == backward else problem.durations_us[:, b]
            reached = far[:, a] + problem.lags_us[:, e] + own
            far[:, b] = np.where(far[:, a] >= 0, np.maximum(far[:, b], reached), far[:, b])
    return np.maximum(far[:, backward], 0)


def _area(problem: BatchProblem, rank: int, before: int, after: int) -> BatchBound:
    """Bytes times µs that all micro-batches hold at least, over the limit."""
    forward, backward, weight = problem.roles[rank].tolist()
    durations, held, peaks = problem.durations_us, problem.held_bytes, problem.peak_bytes
    until_backward = durations[:, forward] + _turns(problem, rank) + durations[:, backward]
    area = held[:, forward].astype(object) * until_backward
    own = [forward, backward]
    if weight >= 0:
        left = np.maximum(held[:, forward] + held[:, backward], 0)
        area = area + left.astype(object) * durations[:, weight]
        own.append(weight)
    for task in own:
        area = area + peaks[:, task].astype(object) * durations[:, task]
    limit = int(problem.limits_bytes[rank])
    us = before + -(-int(area.sum()) // max(limit, 1)) + after
    return BatchBound(us, ALL_ORDERS, f"what micro-batches hold on rank {rank} over time, in its limit")


def _turnaround(problem: BatchProblem, rank: int, work_us: int) -> BatchBound:
    """Between F and B of a micro-batch only later forwards and earlier backwards can run, within the memory left."""
    forward, backward, weight = problem.roles[rank].tolist()
    durations, limit = problem.durations_us, int(problem.limits_bytes[rank])
    held, turns = problem.held_bytes[:, forward], _turns(problem, rank)
    idle = np.zeros(problem.num_microbatches, np.int64)
    backwards = durations[:, backward] + (durations[:, weight] if weight >= 0 else 0)
    if weight < 0:
        for m in np.argsort(-held, kind="stable")[:_MOST_TURNAROUNDS].tolist():
            others = np.arange(problem.num_microbatches) != m
            room = limit - int(held[m])
            fits = _knapsack(durations[others, forward], held[others], room)
            fits += _knapsack(backwards[others], held[others], room)
            idle[m] = max(int(turns[m]) - fits, 0)
    alone = 2 * held > limit  # no two of these are in flight at once, so their idle times are apart
    lost = max(int(idle[alone].sum()), int(idle.max()))
    why = f"rank {rank} must wait for large micro-batches to come back: memory has too little room for others meanwhile"
    return BatchBound(work_us + lost, ANY_SEQUENCE, why)


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
