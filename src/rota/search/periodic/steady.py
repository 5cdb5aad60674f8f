"""The best steady state of a placement: which period a long step can repeat with, and a proof that none is shorter.

A period T of one micro-batch of each component is sought from the proven bound upwards, by growing steps, then by
bisection; every rhythm found is retimed to its exact least period. The proof is that no rhythm exists at T − 1. Where
memory is tight, several micro-batches per period reach rates in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain, pairwise
from math import ceil
from typing import Literal, NamedTuple

import numpy as np

from rota.core.errors import PlanError
from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.core.simulation import simulate
from rota.core.stopping import Stopped
from rota.core.tasks import scalar
from rota.core.timeline import Timeline
from rota.search.bounds.memory_bounds import period_bound
from rota.search.budget import Budget
from rota.search.dispatching import serial
from rota.search.periodic.loop import Loop
from rota.search.periodic.modulo import Answer, Interval, Period
from rota.search.periodic.offsets import anneal_offsets
from rota.search.periodic.retiming import Rhythm
from rota.search.problem import Integers, Orders, Problem
from rota.search.timing import Tables, fits, start_times

_MOST_COPIES = 6
_SOLVE_S, _PROVE_S, _POLISH_S = 0.8, 2.0, 0.1  # nominal, for CP-SAT at a time
_MOST_RESERVES = 20  # how often to guess the memory reserved for transfers
_SIMULATE_S = 0.005  # nominal, about, to simulate the plans of a rhythm
_COPIES_S = 4.0  # nominal, for one number of micro-batches per period
_FIRST_STEP = 16  # the second period tried is longer than the first by this part of the bound
_PRECISION = 200  # a gain of less than this part of a period is not worth another attempt, except for a proof


@dataclass(frozen=True)
class Steady:
    """A repeating period: start times, memory, and the plans made from it.

    Attributes:
        placement: Its tasks.
        microbatches_per_period: Of each component.
        period_us: Length of the period.
        starts_us: Micro-batch j of the first period starts task i at `starts_us[i][j]`, and a period later in each next
            period. The earliest start is 0. What messages cost before an op is part of it. After the tasks come the
            transfers that shared links serve, in the order of `placement.routes`.
        ties: `ties[i][j]` is its place among those that start at the same instant.
    """

    placement: Placement
    microbatches_per_period: int
    period_us: int
    starts_us: tuple[tuple[int, ...], ...]
    ties: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, placement: Placement, num_copies: int, rhythm: Rhythm) -> Steady:
        """The steady state with this rhythm, its first task at time 0."""
        first = min(rhythm.starts_us)
        nodes = range(0, len(rhythm.starts_us), num_copies)
        starts_us = tuple(tuple(start - first for start in rhythm.starts_us[i : i + num_copies]) for i in nodes)
        ties = tuple(rhythm.ties[i : i + num_copies] for i in nodes)
        return cls(placement, num_copies, rhythm.period_us, starts_us, ties)

    @cached_property
    def _problem(self) -> Problem:
        """The tasks, and the transfers on shared links as further ones."""
        return Problem(self.placement, self.placement.num_components)

    @property
    def us_per_microbatch(self) -> Fraction:
        """The period over the number of its micro-batches."""
        return Fraction(self.period_us, self.microbatches_per_period * self.placement.num_components)

    @property
    def latency_us(self) -> int:
        """Time from the first start to the last end of a period's micro-batches: fill and drain."""
        tasks = self._problem.placement.tasks
        return max(max(starts) + scalar(task.duration_us) for task, starts in zip(tasks, self.starts_us, strict=True))

    def flat_starts(self, num_microbatches: int) -> list[list[int]]:
        """[num_tasks][...]: µs at which each task starts its micro-batches; fill and drain have the same gaps."""
        u, num_components = self.microbatches_per_period, self.placement.num_components
        counts = [len(range(c, num_microbatches, num_components)) for c in self._problem.placement.component_of]
        return [
            [starts[i % u] + i // u * self.period_us for i in range(count)]
            for count, starts in zip(counts, self.starts_us, strict=True)
        ]

    def unroll(self, num_microbatches: int) -> Plan:
        """The plan of so many micro-batches in which each rank does its ops in the order of their flat starts."""
        return Problem(self.placement, num_microbatches).to_plan(self.orders(num_microbatches))

    def orders(self, num_microbatches: int) -> Orders:
        """The orders of `unroll`."""
        problem = Problem(self.placement, num_microbatches)
        return problem.task_of[self._nodes(problem)].astype(np.int32)

    def _nodes(self, problem: Problem) -> Integers:
        """int64[...]: the nodes of each rank, in the order of their flat starts."""
        tasks, task_of, ranks = problem.placement.tasks, problem.task_of, problem.ranks
        nth = np.arange(len(task_of)) - problem.first_node[task_of]
        names = sorted({(task.stage, task.kind) for task in tasks})
        columns = (
            task_of,
            nth,
            np.array([names.index((task.stage, task.kind)) for task in tasks])[task_of],
            np.array(self.ties)[task_of, nth % self.microbatches_per_period],
            problem.durations_us[task_of] > 0,
            self._flat(problem),
        )
        nodes = np.repeat(np.arange(len(task_of)), np.diff(ranks.first)[task_of])
        on = np.concatenate([np.tile(row, count) for row, count in zip(ranks, problem.counts, strict=True)])
        return nodes[np.lexsort((*(column[nodes] for column in columns), on))]

    def _flat(self, problem: Problem) -> Integers:
        """int64[num_ops]: the flat start of each node."""
        return np.fromiter(chain.from_iterable(self.flat_starts(problem.num_microbatches)), np.int64)

    @cached_property
    def _timeline(self) -> Timeline:
        """Everything at its flat start, until the state is steady."""
        periods = self.latency_us // self.period_us + 3
        num_microbatches = periods * self.microbatches_per_period * self.placement.num_components
        problem, flat = Problem(self.placement, num_microbatches), self.flat_starts(num_microbatches)
        nodes, first, starts = self._nodes(problem), problem.first_op, self._flat(problem)
        plan = problem.to_plan(problem.task_of[nodes].astype(np.int32))
        ends = starts + problem.durations_us[problem.task_of]
        rows = [nodes[first[rank] : first[rank + 1]] for rank in range(problem.num_ranks)]
        service_of = {r: len(problem.original.tasks) + i for i, r in enumerate(problem.lowered.services)}
        sent, arrived = [], []
        for r, route in enumerate(self.placement.routes):
            task = service_of.get(r, route.source)
            after_us = 0 if r in service_of else scalar(problem.original.tasks[task].duration_us)
            sent.append(tuple(start + after_us for start in flat[task]))
            arrived.append(tuple(start + scalar(route.duration_us) for start in sent[-1]))
        starts_us, ends_us = (tuple(tuple(us[row].tolist()) for row in rows) for us in (starts, ends))
        return Timeline(plan, starts_us, ends_us, tuple(sent), tuple(arrived), ())

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most that each rank holds when everything starts at its flat start."""
        return self._timeline.peak_memory_bytes

    def most_bytes(self, num_microbatches: int | None = None) -> tuple[int, ...]:
        """The most that each rank holds at flat starts or in the unrolled plan of so many micro-batches.

        A plan's ops start as soon as they can, so earlier than at flat starts, and then what was sent waits longer.
        With None: in plans that only fill, that have just filled, and that are long.
        """
        if not any(route.num_bytes for route in self.placement.routes):
            return self.peak_bytes
        per_period = self.microbatches_per_period * self.placement.num_components
        filling = self.latency_us // self.period_us
        lengths = [per_period * periods for periods in (1, filling + 1, filling + 2, 4 * filling + 8)]
        if num_microbatches is not None:
            lengths = [num_microbatches]
        peaks = (simulate(self.unroll(length)).peak_memory_bytes for length in lengths)
        return tuple(map(max, self.peak_bytes, *peaks))

    def over_bytes(self, num_microbatches: int | None = None) -> tuple[int, ...]:
        """By how much each rank exceeds its limit, at what `most_bytes` says."""
        limits = self.placement.cluster.limit_bytes
        peaks = self.most_bytes(num_microbatches)
        return tuple(0 if limit is None else max(peak - limit, 0) for peak, limit in zip(peaks, limits, strict=True))

    def verify(self) -> None:
        """Raises PlanError where flat starts come before data, overlap on a rank, or hold more than its limit.

        A replay would repair such starts by later ones. Here they are refused: the period itself has to be right.
        """
        timeline, problem = self._timeline, self._problem
        tasks, flat = problem.placement.tasks, self.flat_starts(timeline.plan.num_microbatches)
        for (source, target), lag in problem.lags_us.items():
            for made, read in zip(flat[source], flat[target], strict=True):
                if read < made + scalar(tasks[source].duration_us) + lag:
                    raise PlanError(f"{tasks[target]} starts at {read} µs, before {tasks[source]} has arrived", "cycle")
        for rank, on in enumerate(problem.tasks_on):
            times = sorted((s, s + scalar(tasks[task].duration_us)) for task in on.tolist() for s in flat[task])
            if any(start < end for (_, end), (start, _) in pairwise(times)):
                raise PlanError(f"what {problem.rank_name(rank)} does overlaps in the steady state", "cycle")
        for rank, (peak, limit) in enumerate(zip(self.peak_bytes, self.placement.cluster.limit_bytes, strict=True)):
            if limit is not None and peak > limit:
                raise PlanError(f"rank {rank} would hold {peak} bytes in the steady state, limit {limit}", "memory")
        simulate(timeline.plan)  # nothing waits in a cycle, not even at one instant


@dataclass(frozen=True)
class SteadyResult:
    """The best steady state found.

    Attributes:
        steady: The steady state.
        bound_us: No steady state takes less time per micro-batch, however many micro-batches make a period.
        proven_for: Whether none with as many micro-batches per period takes less.
    """

    steady: Steady
    bound_us: Fraction
    proven_for: bool

    @property
    def is_optimal(self) -> bool:
        """Whether its time per micro-batch reaches the bound."""
        return self.steady.us_per_microbatch <= self.bound_us


def find_steady(
    placement: Placement,
    budget: Budget,
    *,
    microbatches_per_period: int | None = None,
    in_flight: int | None = None,
    seed: int = 0,
    num_microbatches: int | None = None,
) -> SteadyResult | None:
    """The steady state of least time per micro-batch, then least latency, then memory.

    It fits at flat starts and when it is unrolled to `num_microbatches`. Where rhythms fit at flat starts only, the
    search goes on with more and more memory reserved for transfers.

    Args:
        placement: The tasks of one micro-batch, and the cluster with its memory limits.
        budget: What the search may spend.
        microbatches_per_period: Of each component; None tries one and more.
        in_flight: Most micro-batches of a component that a period mixes; None: any number.
        seed: Of all random choices.
        num_microbatches: Length of the plan that has to fit; None: plans of several lengths.

    Returns:
        The best that was found; None if none was found, if not even one micro-batch alone fits, or if it leaves
        something behind on a rank with a limit.
    """
    best: SteadyResult | None = None
    options = _Options(in_flight, seed, num_microbatches)
    reserved = np.zeros(placement.num_ranks + len(placement.cluster.shared), np.int64)
    copies = range(1, _MOST_COPIES + 1) if microbatches_per_period is None else (microbatches_per_period,)
    for _ in range(_MOST_RESERVES):
        loop = Loop(placement, tuple(reserved.tolist()))
        best, over = _with_reserve(loop, copies, budget, options, best)
        if not over.any() or budget.is_over or (best is not None and best.is_optimal):
            break
        reserved += over
    return best


class _Options(NamedTuple):
    """Some arguments of `find_steady`."""

    in_flight: int | None
    seed: int
    num_microbatches: int | None


def _with_reserve(
    loop: Loop, copies: Iterable[int], budget: Budget, options: _Options, best: SteadyResult | None
) -> tuple[SteadyResult | None, Integers]:
    """(`best` or a better one, by how much the fastest that did not fit when unrolled exceeded the limits)."""
    over = np.zeros(loop.placement.num_ranks, np.int64)
    if any(limit is not None and loop.left_bytes(rank) > 0 for rank, limit in enumerate(loop.limits_bytes)):
        return best, over
    one_by_one = _one_by_one(loop)
    if one_by_one is None:
        return best, over
    bound_us, num_components = period_bound(loop.original), loop.original.num_components
    for num_copies in copies:
        below = None if best is None else ceil(best.steady.us_per_microbatch * num_copies * num_components)
        search = _Search(loop, num_copies, bound_us * num_components, budget, options)
        rhythm = search.run(one_by_one, below)
        over = over if over.any() else search.over_bytes
        if rhythm is not None:
            best = SteadyResult(Steady.of(loop.original, num_copies, rhythm), bound_us, search.is_proven)
        if budget.is_over or (best is not None and (best.is_optimal or best.steady.period_us == 1)):
            break
    return best, over


def _one_by_one(loop: Loop) -> Rhythm | None:
    """One micro-batch of each component after the other; None if even that does not fit."""
    orders = serial(loop.problem)
    starts = start_times(Tables.of(loop.problem), orders)
    if starts is None or not fits(loop.problem, orders):
        return None
    period_us = max(int((starts + loop.problem.durations_us).max()) + max(loop.problem.lags_us.values(), default=0), 1)
    return Rhythm(period_us, tuple(starts.tolist()), tuple(np.argsort(loop.problem.topological).tolist()))


class _Search:
    """Looks for the least period of `num_copies` micro-batches per component; `proven_us` is a bound for it."""

    def __init__(self, loop: Loop, num_copies: int, bound_us: Fraction, budget: Budget, options: _Options) -> None:
        self.has_carries = any(loop.carried)
        #: int64[num_ranks], of the fastest rhythm that fits at flat starts only.
        self.over_bytes = np.zeros(loop.placement.num_ranks, np.int64)
        self.loop, self.num_copies, self.options = loop, num_copies, options
        self.budget, self.spare = budget.share(_COPIES_S), budget.share(_SOLVE_S)
        self.proven_us = max(ceil(bound_us * num_copies), 1)
        self.best: Rhythm | None = None

    @property
    def is_proven(self) -> bool:
        """Whether no shorter period exists. With reserved memory a failed attempt proves nothing; see `_note_none`."""
        return self.best is not None and self.best.period_us <= self.proven_us

    def run(self, one_by_one: Rhythm, below_us: int | None) -> Rhythm | None:
        """The rhythm of the least period, if it is less than `below_us`; nothing slower than `one_by_one` is tried."""
        most_us = one_by_one.period_us * self.num_copies if below_us is None else below_us
        if self.num_copies == 1:
            self.take(one_by_one)
        low = self.proven_us  # where to look next: nothing was found below
        step = max(low // _FIRST_STEP, 1)
        tried = low
        while not self._try(tried):
            low, tried, step = tried + 1, tried + step, step * 2
            if self.budget.is_over or tried >= most_us:
                break
        if self.best is None and below_us is None:  # one micro-batch after the other always works
            interval = self._interval(self.num_copies * self.loop.critical_us)
            self._take_answer(self._solved(interval, self.spare))
        while self.best is not None and not self.budget.is_over:
            high = self.best.period_us
            if high - max(low, self.proven_us) < max(high // _PRECISION, 1):
                break
            middle = (max(low, self.proven_us) + high) // 2
            if not self._try(middle):
                low = middle + 1
        if self.best is None or (below_us is not None and self.best.period_us >= below_us):
            return None
        self._prove()
        if self._solve_for("latency"):
            self._solve_for("memory")
        return self.best

    def _solved(
        self,
        interval: Interval,
        budget: Budget,
        goal: Literal["any", "latency", "memory"] = "any",
        hint_us: Sequence[int] | None = None,
    ) -> Answer:
        try:
            model = Period(interval, goal)
            if hint_us is not None:
                model.hint(hint_us)
            return model.solve(budget, self.options.seed)
        except Stopped:  # the best so far stays
            return Answer(None, False)

    def _interval(self, period_us: int, latency_us: int | None = None) -> Interval:
        return Interval(self.loop, self.num_copies, period_us, latency_us, self.options.in_flight)

    def take(self, rhythm: Rhythm | None) -> bool:
        """Keep the rhythm if it is faster than the best one, and fits; returns whether it is kept."""
        if rhythm is None or (self.best is not None and rhythm.period_us >= self.best.period_us):
            return False
        if self._fits(rhythm):
            self.best = rhythm
        return self.best is rhythm

    def _take_answer(self, answer: Answer) -> bool:
        """Keep the rhythm with the earliest starts, or else the model's own; returns whether one is kept."""
        return self.take(answer.rhythm) or (self.has_carries and self.take(answer.as_solved))

    def _fits(self, rhythm: Rhythm) -> bool:
        """Orders fit by themselves; what transfers hold depends on the times."""
        if not self.has_carries:
            return True
        steady = Steady.of(self.loop.original, self.num_copies, rhythm)
        over = np.zeros(self.loop.placement.num_ranks, np.int64)
        over[: self.loop.original.num_ranks] = steady.over_bytes(self.options.num_microbatches)
        self.budget.spend(_SIMULATE_S)
        if not self.over_bytes.any():
            self.over_bytes = over
        return not over.any()

    def _try(self, period_us: int) -> bool:
        """Look for a rhythm of at most this period; returns whether one is known afterwards."""
        if self.best is not None and self.best.period_us <= period_us:
            return True
        interval = self._interval(period_us)
        answer = self._solved(interval, self.budget.share(_SOLVE_S))
        self._take_answer(answer)
        if answer.rhythm is None and answer.is_proven:
            self._note_none(period_us)
            return False
        # Annealing ignores `in_flight`.
        if answer.rhythm is None and not self.budget.is_over and self.options.in_flight is None:
            with suppress(Stopped):  # the best so far stays
                self.take(anneal_offsets(interval, self.budget, self.options.seed))
        return self.best is not None and self.best.period_us <= period_us

    def _note_none(self, period_us: int) -> None:
        if not any(self.loop.reserved_bytes):
            self.proven_us = max(self.proven_us, period_us + 1)

    def _prove(self) -> None:
        """Tries to prove that no period is a µs shorter."""
        while self.best is not None and not self.is_proven and not self.budget.is_over:
            answer = self._solved(self._interval(self.best.period_us - 1), self.budget.share(_PROVE_S))
            if answer.rhythm is None and answer.is_proven:
                self._note_none(self.best.period_us - 1)
            if not self._take_answer(answer):
                return

    def _solve_for(self, goal: Literal["latency", "memory"]) -> bool:
        """Looks for the same period with less latency, or memory; whether it is proven that none is better."""
        assert self.best is not None
        latency_us = Steady.of(self.loop.original, self.num_copies, self.best).latency_us
        interval = self._interval(self.best.period_us, latency_us)
        answer = self._solved(interval, self.budget.share(_POLISH_S), goal, self.best.starts_us)
        for rhythm in (answer.rhythm, answer.as_solved if self.has_carries else None):
            if rhythm is not None and self._fits(rhythm):
                self.best = rhythm
                break
        return answer.is_proven
