"""From a batch's lengths to its plan: groups, their sequence, each rank's order, and how good these are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rota.batching.bounds import ALL_ORDERS, ANY_SEQUENCE, THIS_SEQUENCE, BatchBound, of_any_sequence, of_grouping
from rota.batching.dispatching import Dispatch, Policy, dispatch
from rota.batching.figures import Layout, Place
from rota.batching.grouping import Grouper, Groups
from rota.batching.improving import best_policy, falling, improve, valley
from rota.batching.memory_use import peaks_bytes
from rota.batching.problem import NO_LIMIT, BatchProblem, Integers
from rota.batching.result import BatchPlan
from rota.batching.windows import sequence_bound_us
from rota.costs import Cluster
from rota.errors import SearchError
from rota.placing import place as place_chain
from rota.plan import Plan
from rota.simulation import simulate
from rota.sizes import Size, SizeModel
from rota.tasks import Op

_ROUNDS_FOR_TRANSFERS = 8  # of lower limits, until what transfers hold fits too
_SHARES_OF_TRIES = (0.4, 0.3, 0.2, 0.1)  # of a local search; what transfers hold is counted after each


class _Candidate(NamedTuple):
    """A grouping."""

    groups: Groups
    sizes: tuple[Size, ...]
    problem: BatchProblem
    bounds: list[BatchBound]

    @property
    def bound_us(self) -> int:
        return max(bound.us for bound in self.bounds if bound.among == ALL_ORDERS)


class _Found(NamedTuple):
    """A grouping with a dispatch that fits."""

    candidate: _Candidate
    reserved_bytes: Integers  #: int64[num_ranks]: kept free for what transfers hold
    sequence: Integers
    policy: Policy
    dispatch: Dispatch

    @property
    def makespan_us(self) -> int:
        return self.dispatch.makespan_us


def plan_batch(
    model: SizeModel,
    cluster: Cluster,
    lengths: Sequence[int],
    *,
    packed: bool = False,
    place: Place = place_chain,
    tries: int = 300,
) -> BatchPlan:
    """The micro-batches of a batch of samples, and a plan for them with a proof of how good it is.

    Groups come from a dynamic program at several largest times of a micro-batch; a local search then changes sequence
    and policy of list scheduling. The same arguments give the same plan, on every rank and machine.

    Args:
        model: What stages cost as a function of a micro-batch's size.
        cluster: The ranks, with their memory limits, and the links.
        lengths: Per sample its number of tokens.
        packed: Whether the samples of a micro-batch follow one another in one row, each attending to only itself.
            Else each is a row, padded to the longest of its micro-batch.
        place: Puts the stages on ranks: `rota.place`, `rota.interleaved`, `rota.wave`, or your own.
        tries: Dispatches of the local search: more take longer and find better plans.

    Returns:
        The plan, the samples of each micro-batch, and the bounds.

    Raises:
        SearchError: A sample fits in no micro-batch, or the placement is not supported.
        PlacementError: The stages do not fit the cluster.
    """
    layout = Layout.of(model, cluster, place)
    grouper = Grouper(layout, lengths, packed)
    found = _search(layout, grouper, tries)
    groups, sizes, problem, bounds = found.candidate
    sequence = found.sequence
    plan = _plan(layout, found)
    makespan_us = found.makespan_us if layout.has_exact_tails else simulate(plan).makespan_us
    return BatchPlan(
        plan,
        tuple(grouper.samples(groups[m]) for m in sequence.tolist()),
        tuple(sizes[m] for m in sequence.tolist()),
        makespan_us,
        _proven(problem, sequence, bounds, makespan_us),
    )


def _search(layout: Layout, grouper: Grouper, tries: int) -> _Found:
    """The best of all groupings, improved. Groupings whose bound is above a plan that is known are left out."""
    candidates = []
    for groups in grouper.groupings():
        sizes = tuple(map(grouper.size, groups))
        problem = layout.problem(sizes)
        candidates.append(_Candidate(groups, sizes, problem, of_grouping(problem)))
    candidates.sort(key=lambda candidate: candidate.bound_us)
    best: _Found | None = None
    for candidate in candidates:
        if best is None or candidate.bound_us < best.makespan_us:
            best = _better(best, _first_plan(candidate, valley(candidate.problem)))
    if best is None:
        raise SearchError(
            "no grouping of the batch fits in memory beside what transfers hold; raise the limits, or give the ranks "
            "fewer layers"
        )
    best = _better(best, _first_plan(best.candidate, falling(best.candidate.problem)))
    assert best is not None
    return _improved(best, tries)


def _better(one: _Found | None, other: _Found | None) -> _Found | None:
    return min((each for each in (one, other) if each), key=lambda each: each.makespan_us, default=None)


def _first_plan(candidate: _Candidate, sequence: Integers) -> _Found | None:
    """A sequence with a good policy; None if memory has no room for what transfers hold."""
    problem = candidate.problem
    reserved = np.zeros(problem.num_ranks, np.int64)
    for _ in range(_ROUNDS_FOR_TRANSFERS):
        policy, found = best_policy(_with_reserve(problem, reserved), sequence)
        if not found.is_complete:
            return None
        over = peaks_bytes(problem, sequence, found) - problem.limits_bytes
        if (over <= 0).all():
            return _Found(candidate, reserved, sequence, policy, found)
        reserved = reserved + np.maximum(over, 0)
    return None


def _improved(best: _Found, tries: int) -> _Found:
    """The plan after a local search. Where transfers overflow the memory, it goes on with more reserved for them."""
    problem, reserved, goal_us = best.candidate.problem, best.reserved_bytes, best.candidate.bound_us
    sequence, policy = best.sequence, best.policy
    for share in _SHARES_OF_TRIES:
        tight = _with_reserve(problem, reserved)
        sequence, policy = improve(tight, sequence, policy, goal_us, int(tries * share))
        found = dispatch(tight, sequence, policy)
        if not found.is_complete:
            break
        over = peaks_bytes(problem, sequence, found) - problem.limits_bytes
        if (over > 0).any():
            reserved = reserved + np.maximum(over, 0)
        elif found.makespan_us <= best.makespan_us:
            best = _Found(best.candidate, reserved, sequence, policy, found)
    return best


def _with_reserve(problem: BatchProblem, reserved_bytes: Integers) -> BatchProblem:
    """The problem with less memory on ranks that have a limit."""
    if not reserved_bytes.any():
        return problem
    limited = problem.limits_bytes < NO_LIMIT
    return replace(problem, limits_bytes=np.where(limited, problem.limits_bytes - reserved_bytes, NO_LIMIT))


def _plan(layout: Layout, found: _Found) -> Plan:
    """The plan, its micro-batches numbered in sequence."""
    _, sizes, problem, _ = found.candidate
    placement = layout.placed(problem, sizes, found.sequence)
    keys = [(placement.tasks[i].stage, placement.tasks[i].kind) for i in layout.sorted_tasks]
    orders = []
    for row in found.dispatch.orders.tolist():
        begun = [0] * len(keys)
        order = []
        for task in row:
            if task < 0:
                break
            stage, kind = keys[task]
            order.append(Op(stage, kind, begun[task]))
            begun[task] += 1
        orders.append(tuple(order))
    return Plan(placement, problem.num_microbatches, tuple(orders))


def _proven(
    problem: BatchProblem, sequence: Integers, bounds: list[BatchBound], makespan_us: int
) -> tuple[BatchBound, ...]:
    """The highest bound of each sort, from the largest set of plans to the smallest."""
    highest: dict[str, BatchBound] = {}
    for bound in sorted([*bounds, *of_any_sequence(problem)], key=lambda bound: bound.us):
        highest[bound.among] = bound
    if problem.has_one_stage_per_rank:
        lowest_us = max(bound.us for bound in highest.values())
        us = sequence_bound_us(problem, sequence, lowest_us, makespan_us)
        highest[THIS_SEQUENCE] = BatchBound(us, THIS_SEQUENCE, "no times of all ops fit into less")
    return tuple(highest[among] for among in (ALL_ORDERS, ANY_SEQUENCE, THIS_SEQUENCE) if among in highest)
