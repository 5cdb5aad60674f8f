"""From a batch's lengths to its plan: groups, their sequence, each rank's order, and how good these are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from heapq import heapreplace
from itertools import chain, count, pairwise
from operator import attrgetter
from typing import NamedTuple, TypedDict, Unpack

import numpy as np

from rota.batching.bounds import ALL_ORDERS, ANY_SEQUENCE, THIS_SEQUENCE, BatchBound, of_any_sequence, of_grouping
from rota.batching.climbing import climb
from rota.batching.dispatching import Dispatch, by_policy, falling, valley
from rota.batching.figures import Layout, Place
from rota.batching.grouping import Grouper
from rota.batching.problem import NO_LIMIT, BatchProblem, Integers
from rota.batching.replaying import peaks_bytes, replay
from rota.batching.result import BatchPlan
from rota.batching.rules import by_few_rules, by_rule
from rota.batching.windows import sequence_bound_us
from rota.compiled import is_on_disk
from rota.core.cluster import Cluster
from rota.core.errors import NothingFitsError, SearchError
from rota.core.placing import place as place_chain
from rota.core.plan import Plan
from rota.core.simulation import simulate
from rota.core.sizes import Size, SizeModel
from rota.core.tasks import Op

_ROUNDS_FOR_TRANSFERS = 8  # of lower limits, until what transfers hold fits too
_PARTS = (0.0, 0.5, 0.8, 1.0)  # of a local search; what transfers hold is counted after each
_NUM_STARTS = 2  # of local searches of a long step; all are tried where there are so many tries:
_TRIES_FOR_ALL = 4_000
_MOST_SHUFFLED = 24  # of these starts have a random sequence, one for each so many tries
_OPS_TIMED = 3_000_000  # in all tries of a local search, if the number of tries is not given
_ANY_NUMBER = 1 << 60
_NO_LIMIT_S = 1e9
_FAR = 1.05  # times its bound: above it, the best plan by rules is compared with plans by policies
_NUM_BY_POLICY = 4  # groupings that are then planned by policies
_FEWEST_GROUPINGS = 5  # that are compared, even if the time is over
_GROUPS_UNTIL = 0.5  # of a time limit
_CLIMBS_UNTIL = 0.7  # of a time limit; the rest is for the plan and its bound

_Orders = Callable[[BatchProblem, Integers], Dispatch | None]
_Sequence = Callable[[BatchProblem], Integers]


class _Candidate(NamedTuple):
    """A grouping."""

    starts: Integers
    sizes: tuple[Size, ...]
    problem: BatchProblem
    bounds: list[BatchBound]

    @property
    def bound_us(self) -> int:
        return max(bound.us for bound in self.bounds if bound.among == ALL_ORDERS)

    @property
    def is_tight(self) -> bool:
        """Whether memory has no room for as many micro-batches as ranks, so that the bound is far from any plan."""
        problem = self.problem
        return bool((problem.mean_held_bytes * problem.num_ranks > problem.limits_bytes).any())


class _Step(NamedTuple):
    """A grouping with orders that fit."""

    candidate: _Candidate
    reserved_bytes: Integers  #: int64[num_ranks]: kept free for what transfers hold
    sequence: Integers
    dispatch: Dispatch

    @property
    def makespan_us(self) -> int:
        return self.dispatch.makespan_us


_makespan_us: Callable[[_Step], int] = attrgetter("makespan_us")


def plan_batch(
    model: SizeModel,
    cluster: Cluster,
    lengths: Sequence[int],
    *,
    packed: bool = False,
    place: Place = place_chain,
    tries: int | None = None,
    time_limit_s: float | None = None,
) -> BatchPlan:
    """Group the samples of a batch into micro-batches, and plan their step, with proven bounds.

    Groups come from a dynamic program at several largest times of a micro-batch; a local search then changes sequence
    and orders. Without a time limit, the same arguments give the same plan, on every rank and machine.

    Args:
        model: What stages cost as a function of a micro-batch's size.
        cluster: The ranks, with their memory limits, and the links.
        lengths: The number of tokens of each sample.
        packed: Whether the samples of a micro-batch follow one another in one row, each attending only to itself.
            Otherwise each is a row, padded to the longest of its micro-batch.
        place: Puts the stages on ranks: `rota.place`, `rota.interleaved`, `rota.wave`, or your own.
        tries: Changes that the local search tries: more take longer and find better plans. None: about as many as take
            a twentieth of a second.
        time_limit_s: Seconds after the call at which the local search and the search for a bound end at the latest.

    Returns:
        The plan, the samples of each micro-batch, and the bounds.

    Raises:
        SearchError: A sample fits in no micro-batch, the placement is not supported, or the time limit is below 0.
        PlacementError: The stages do not fit the cluster.
    """
    if time_limit_s is not None and time_limit_s < 0:
        raise SearchError(f"time_limit_s is {time_limit_s}: give the seconds that the search may take, or None")
    clock = _Clock(time_limit_s)
    layout = Layout.of(model, cluster, place)
    grouper = Grouper(layout, lengths, packed)
    best = _improved(_first(layout, grouper, clock), tries, clock)
    starts, sizes, problem, bounds = best.candidate
    samples, sequence = grouper.samples(starts), best.sequence
    plan = _plan(layout, best)
    makespan_us = best.makespan_us if layout.has_exact_tails else simulate(plan).makespan_us
    return BatchPlan(
        plan,
        tuple(samples[m] for m in sequence.tolist()),
        tuple(sizes[m] for m in sequence.tolist()),
        makespan_us,
        _proven(problem, sequence, bounds, makespan_us, clock),
    )


class BatchOptions(TypedDict, total=False):
    """Options of `plan_batch`."""

    packed: bool
    place: Place
    tries: int | None
    time_limit_s: float | None


def plan_replicas(
    model: SizeModel, cluster: Cluster, lengths: Sequence[int], num_replicas: int, **options: Unpack[BatchOptions]
) -> tuple[BatchPlan, ...]:
    """One plan per replica. The longest samples go first, each to the replica with least predicted work so far.

    That is Graham's LPT rule ("Bounds on Multiprocessing Timing Anomalies", 1969). Replicas reduce their gradients
    together, so the step lasts as long as the slowest one.

    Args:
        model: As in `plan_batch`.
        cluster: The ranks of one replica.
        lengths: The number of tokens of each sample of the whole batch.
        num_replicas: Number of replicas, at most one per sample.
        options: `packed`, `place`, `tries` and `time_limit_s`, as in `plan_batch`. The tries are per replica; the time
            is that of all replicas together, of which each gets the same part.

    Returns:
        The plans; `groups` has indices into `lengths`.

    Raises:
        SearchError: As `plan_batch`, or a replica gets no sample.
        PlacementError: The stages do not fit the cluster.
    """
    layout = Layout.of(model, cluster, options.get("place", place_chain))
    Grouper(layout, lengths, options.get("packed", False))  # refuses a sample by its index in the whole batch
    if (limit_s := options.get("time_limit_s")) is not None:
        options["time_limit_s"] = limit_s / num_replicas
    plans = []
    for share in _shares_of(layout, lengths, num_replicas):
        plan = plan_batch(model, cluster, [lengths[i] for i in share], **options)
        plans.append(replace(plan, groups=tuple(tuple(share[i] for i in group) for group in plan.groups)))
    return tuple(plans)


def _shares_of(layout: Layout, lengths: Sequence[int], num_replicas: int) -> list[list[int]]:
    """Each replica's samples, by the rule of `plan_replicas`. Raises SearchError if a replica gets none."""
    if not 1 <= num_replicas <= len(lengths):
        raise SearchError(f"num_replicas is {num_replicas} for {len(lengths)} samples; give each replica at least one")
    tokens = np.array(lengths, np.float64)
    times = (layout.work()[:, 1:] @ np.stack([tokens, tokens * tokens])).max(axis=0)
    shares: list[list[int]] = [[] for _ in range(num_replicas)]
    loads = [(0.0, replica) for replica in range(num_replicas)]  # a heap
    for sample in np.argsort(-times, kind="stable").tolist():
        load, replica = loads[0]
        heapreplace(loads, (load + float(times[sample]), replica))
        shares[replica].append(sample)
    return [sorted(share) for share in shares]


def is_compiled() -> bool:
    """Whether an earlier process on this machine has compiled the loops of the search."""
    return is_on_disk(replay)


class _Clock:
    """A time limit, and shares of it."""

    def __init__(self, limit_s: float | None) -> None:
        self._began_s, self._limit_s = time.monotonic(), _NO_LIMIT_S if limit_s is None else limit_s

    def end_s(self, share: float) -> float:
        """When this share of the limit is over."""
        return self._began_s + share * self._limit_s

    def is_over(self, share: float = 1.0) -> bool:
        """Whether this share of the limit is over."""
        return time.monotonic() >= self.end_s(share)


class _Effort(NamedTuple):
    """What a local search may take."""

    tries: int
    ops: int  #: of replays
    begin_s: float
    end_s: float

    def part(self, begin: float, end: float) -> _Effort:
        """The part of it between two shares of it."""
        share, span_s = end - begin, self.end_s - self.begin_s
        tries, ops = int(self.tries * share), int(self.ops * share)
        return _Effort(tries, ops, self.begin_s + begin * span_s, self.begin_s + end * span_s)

    def is_over(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() >= self.end_s


def _first(layout: Layout, grouper: Grouper, clock: _Clock) -> _Step:
    """A plan of the best grouping. Groupings whose bound is above a plan that is known are left out."""
    groupings = grouper.groupings()
    sizes = [grouper.sizes(starts) for starts in groupings]
    problems = layout.problem([*chain.from_iterable(sizes)]).parts([*map(len, sizes)])
    candidates = [
        _Candidate(starts, sizes_of_groups, problem, of_grouping(problem))
        for starts, sizes_of_groups, problem in zip(groupings, sizes, problems, strict=True)
    ]
    candidates.sort(key=lambda candidate: (candidate.is_tight, candidate.bound_us))
    steps: list[_Step] = []
    for i, candidate in enumerate(candidates):
        has_time = i < _FEWEST_GROUPINGS or not clock.is_over(_GROUPS_UNTIL)
        if steps and not (has_time and candidate.bound_us < min(map(_makespan_us, steps))):
            continue
        if (step := _first_of(candidate)) is not None:
            steps.append(step)
    if not steps:
        raise NothingFitsError(
            "no grouping of the batch fits in memory beside what transfers hold; raise the limits, or give the ranks "
            "fewer layers"
        )
    steps.sort(key=_makespan_us)
    return min([steps[0], *_by_policies(steps, clock)], key=_makespan_us)


def _by_policies(steps: list[_Step], clock: _Clock) -> Iterator[_Step]:
    """Plans by list scheduling of the best groupings, where the best plan by rules is far above its bound.

    That is rare: with split backwards, little memory, and a few micro-batches much longer than all others.
    """
    best = steps[0]
    problem = best.candidate.problem
    if not (problem.has_one_stage_per_rank and problem.has_weights):
        return  # without a split backward, `_improved` tries policies
    if best.makespan_us <= _FAR * best.candidate.bound_us:
        return
    for step in steps[:_NUM_BY_POLICY]:
        if step.candidate.bound_us < best.makespan_us and not clock.is_over(_GROUPS_UNTIL):
            planned = _first_plan(step.candidate, step.sequence, by_policy)
            if planned is not None:
                yield planned


def _first_of(candidate: _Candidate) -> _Step | None:
    """A good plan of a grouping, found fast; None if memory has no room for what transfers hold."""
    sequence, step = valley(candidate.problem), None
    if candidate.problem.has_one_stage_per_rank:
        step = _first_plan(candidate, sequence, by_few_rules)
    return step or _first_plan(candidate, sequence, by_policy)


def _first_plan(candidate: _Candidate, sequence: Integers, orders: _Orders) -> _Step | None:
    """A sequence with good orders; None if memory has no room for what transfers hold."""
    problem = candidate.problem
    reserved = np.zeros(problem.num_ranks, np.int64)
    for _ in range(_ROUNDS_FOR_TRANSFERS):
        dispatch = orders(_with_reserve(problem, reserved), sequence)
        if dispatch is None:
            return None
        excess = peaks_bytes(problem, sequence, dispatch) - problem.limits_bytes
        if (excess <= 0).all():
            return _Step(candidate, reserved, sequence, dispatch)
        reserved = reserved + np.maximum(excess, 0)
    return None


def _improved(best: _Step, tries: int | None, clock: _Clock) -> _Step:
    """The plan after local searches from it and from the best of other starts."""
    candidate = best.candidate
    problem = candidate.problem
    ops = _OPS_TIMED if tries is None else _ANY_NUMBER
    most_tries = ops // problem.num_ops if tries is None else tries
    is_small = most_tries >= _TRIES_FOR_ALL
    tried: list[tuple[_Orders, _Sequence]] = []
    if problem.has_one_stage_per_rank:
        tried += [(by_rule, valley), (by_rule, falling)]
    if is_small or not (problem.has_one_stage_per_rank and problem.has_weights):  # else slower than rules, and worse
        tried += [(by_policy, valley), (by_policy, falling)]
    random = np.random.default_rng(0)
    for _ in range(min(most_tries // _TRIES_FOR_ALL, _MOST_SHUFFLED)):
        tried.append((by_policy, lambda problem: random.permutation(problem.num_microbatches)))
    others = [_first_plan(candidate, sequence(problem), orders) for orders, sequence in tried]
    starts = sorted((best, *filter(None, others)), key=_makespan_us)
    if not is_small:
        starts = starts[:_NUM_STARTS]
    until_s = clock.end_s(_CLIMBS_UNTIL)
    effort = _Effort(_ANY_NUMBER if tries is None else tries, ops, time.monotonic(), until_s)
    for i, start in enumerate(starts):
        climbed = _climbed(start, effort.part(i / len(starts), (i + 1) / len(starts)))
        best = min(best, climbed, key=_makespan_us)
    return best


def _climbed(best: _Step, effort: _Effort) -> _Step:
    """The plan after a local search. Where transfers overflow the memory, it begins again with more room for them."""
    candidate, reserved = best.candidate, best.reserved_bytes
    problem = candidate.problem
    for begin, end in pairwise(_PARTS):
        tight, part = _with_reserve(problem, reserved), effort.part(begin, end)
        sequence, dispatch = climb(
            tight, best.sequence, best.dispatch, candidate.bound_us, part.tries, part.ops, part.is_over
        )
        excess = peaks_bytes(problem, sequence, dispatch) - problem.limits_bytes
        if (excess > 0).any():
            reserved = reserved + np.maximum(excess, 0)
        else:
            best = _Step(candidate, reserved, sequence, dispatch)
    return best


def _with_reserve(problem: BatchProblem, reserved_bytes: Integers) -> BatchProblem:
    """The problem with less memory on ranks that have a limit."""
    if not reserved_bytes.any():
        return problem
    limited = problem.limits_bytes < NO_LIMIT
    return replace(problem, limits_bytes=np.where(limited, problem.limits_bytes - reserved_bytes, NO_LIMIT))


def _plan(layout: Layout, step: _Step) -> Plan:
    """The plan, its micro-batches numbered in sequence."""
    _, sizes, problem, _ = step.candidate
    placement = layout.placed(problem, sizes, step.sequence)
    keys = [(placement.tasks[i].stage, placement.tasks[i].kind) for i in layout.sorted_tasks]
    orders = []
    for row in step.dispatch.orders:
        microbatches = [count() for _ in keys]
        orders.append(tuple(Op(*keys[task], next(microbatches[task])) for task in map(int, row[row >= 0])))
    return Plan(placement, problem.num_microbatches, tuple(orders))


def _proven(
    problem: BatchProblem, sequence: Integers, bounds: list[BatchBound], makespan_us: int, clock: _Clock
) -> tuple[BatchBound, ...]:
    """The highest bound of each sort, from the largest set of plans to the smallest."""
    highest: dict[str, BatchBound] = {}
    for bound in sorted([*bounds, *of_any_sequence(problem)], key=lambda bound: bound.us):
        highest[bound.among] = bound
    if problem.has_one_stage_per_rank:
        lowest_us = max(bound.us for bound in highest.values())
        us = sequence_bound_us(problem, sequence, lowest_us, makespan_us, clock.is_over)
        highest[THIS_SEQUENCE] = BatchBound(us, THIS_SEQUENCE, "no times of all ops fit into less")
    return tuple(highest[among] for among in (ALL_ORDERS, ANY_SEQUENCE, THIS_SEQUENCE) if among in highest)
