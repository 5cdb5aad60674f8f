"""From a batch's lengths to its plan: groups, their sequence, each rank's order, and how good these are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rota.batching.bounds import ALL_ORDERS, ANY_SEQUENCE, THIS_SEQUENCE, BatchBound, of_any_sequence, of_grouping
from rota.batching.climbing import climb
from rota.batching.dispatching import Dispatch
from rota.batching.figures import Layout, Place
from rota.batching.grouping import Grouper, Groups
from rota.batching.memory_use import peaks_bytes
from rota.batching.policies import by_policy, falling, valley
from rota.batching.problem import NO_LIMIT, BatchProblem, Integers
from rota.batching.result import BatchPlan
from rota.batching.rules import by_rule
from rota.batching.windows import sequence_bound_us
from rota.costs import Cluster
from rota.errors import SearchError
from rota.placing import place as place_chain
from rota.plan import Plan
from rota.simulation import simulate
from rota.sizes import Size, SizeModel
from rota.tasks import Op

_ROUNDS_FOR_TRANSFERS = 8  # of lower limits, until what transfers hold fits too
_SHARES_OF_TRIES = (0.5, 0.3, 0.2)  # of a local search; what transfers hold is counted after each
_NUM_STARTS = 2  # of local searches of a long step; all are tried where there are so many tries:
_TRIES_FOR_ALL = 4_000
_OPS_TIMED = 2_000_000  # in all tries of a local search

_Orders = Callable[[BatchProblem, Integers], Dispatch | None]


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
    """A grouping with orders that fit."""

    candidate: _Candidate
    reserved_bytes: Integers  #: int64[num_ranks]: kept free for what transfers hold
    sequence: Integers
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
    tries: int | None = None,
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
        tries: Changes that the local search tries: more take longer and find better plans. None: about as many as it
            times 2,000,000 ops with.

    Returns:
        The plan, the samples of each micro-batch, and the bounds.

    Raises:
        SearchError: A sample fits in no micro-batch, or the placement is not supported.
        PlacementError: The stages do not fit the cluster.
    """
    layout = Layout.of(model, cluster, place)
    grouper = Grouper(layout, lengths, packed)
    found = _improved(_first(layout, grouper), tries)
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


def _first(layout: Layout, grouper: Grouper) -> _Found:
    """A plan of the best grouping. Groupings whose bound is above a plan that is known are left out."""
    candidates = []
    for groups in grouper.groupings():
        sizes = tuple(map(grouper.size, groups))
        problem = layout.problem(sizes)
        candidates.append(_Candidate(groups, sizes, problem, of_grouping(problem)))
    candidates.sort(key=lambda candidate: candidate.bound_us)
    best: _Found | None = None
    for candidate in candidates:
        if best is None or candidate.bound_us < best.makespan_us:
            best = _better(best, _first_of(candidate))
    if best is None:
        raise SearchError(
            "no grouping of the batch fits in memory beside what transfers hold; raise the limits, or give the ranks "
            "fewer layers"
        )
    return best


def _better(one: _Found | None, other: _Found | None) -> _Found | None:
    return min((each for each in (one, other) if each), key=lambda each: each.makespan_us, default=None)


def _first_of(candidate: _Candidate) -> _Found | None:
    """A good plan of a grouping, found fast; None if memory has no room for what transfers hold."""
    sequence, found = valley(candidate.problem), None
    if candidate.problem.has_one_stage_per_rank:
        found = _first_plan(candidate, sequence, by_rule)
    return found or _first_plan(candidate, sequence, by_policy)


def _first_plan(candidate: _Candidate, sequence: Integers, orders: _Orders) -> _Found | None:
    """A sequence with good orders; None if memory has no room for what transfers hold."""
    problem = candidate.problem
    reserved = np.zeros(problem.num_ranks, np.int64)
    for _ in range(_ROUNDS_FOR_TRANSFERS):
        found = orders(_with_reserve(problem, reserved), sequence)
        if found is None:
            return None
        over = peaks_bytes(problem, sequence, found) - problem.limits_bytes
        if (over <= 0).all():
            return _Found(candidate, reserved, sequence, found)
        reserved = reserved + np.maximum(over, 0)
    return None


def _improved(best: _Found, tries: int | None) -> _Found:
    """The plan after local searches from it and from the best of other starts."""
    candidate = best.candidate
    problem = candidate.problem
    if tries is None:
        tries = _OPS_TIMED // (problem.num_microbatches * problem.num_tasks)
    is_small = tries >= _TRIES_FOR_ALL
    tried = []
    if problem.has_one_stage_per_rank:
        tried.append((by_rule, falling))
    if is_small or not (problem.has_one_stage_per_rank and problem.has_weights):  # else slower than rules, and worse
        tried += [(by_policy, valley), (by_policy, falling)]
    others = [_first_plan(candidate, sequence(problem), orders) for orders, sequence in tried]
    starts = sorted((best, *(each for each in others if each)), key=lambda each: each.makespan_us)
    if not is_small:
        starts = starts[:_NUM_STARTS]
    for start in starts:
        best = min(best, _climbed(start, tries // len(starts)), key=lambda each: each.makespan_us)
    return best


def _climbed(best: _Found, tries: int) -> _Found:
    """The plan after a local search. Where transfers overflow the memory, it begins again with more room for them."""
    candidate, reserved = best.candidate, best.reserved_bytes
    problem = candidate.problem
    for share in _SHARES_OF_TRIES:
        tight = _with_reserve(problem, reserved)
        sequence, found = climb(tight, best.sequence, best.dispatch, candidate.bound_us, int(tries * share))
        over = peaks_bytes(problem, sequence, found) - problem.limits_bytes
        if (over > 0).any():
            reserved = reserved + np.maximum(over, 0)
        else:
            best = _Found(candidate, reserved, sequence, found)
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
