"""The best steady state of a placement: which period a long step can repeat with, and a proof that none is shorter.

A period T of one micro-batch of each stream is looked for from the proven bound upwards, by growing steps, then by
bisection; every rhythm found is retimed to its true least period. No rhythm at T − 1 is the proof. Where memory is
tight, several micro-batches a period reach rates between those of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import ceil
from typing import Literal

from rota.errors import PlanError
from rota.placement import Placement
from rota.plan import Plan
from rota.search.budget import Budget
from rota.search.dispatching import serial
from rota.search.holding import period_bound
from rota.search.loop import Loop
from rota.search.modulo import Period, Window
from rota.search.offsets import anneal
from rota.search.retiming import Rhythm
from rota.search.timing import Tables, fits, start_times
from rota.simulation import simulate
from rota.tasks import Op
from rota.timeline import Timeline

_MOST_COPIES = 6
_SOLVE_S, _PROVE_S, _POLISH_S = 0.8, 2.0, 0.1  # nominal, for CP-SAT at a time
_COPIES_S = 4.0  # nominal, for one number of micro-batches a period
_FIRST_STEP = 16  # this part of a bound the second period tried lies from the first
_PRECISION = 200  # this part of a period is not worth another attempt, but for a proof


@dataclass(frozen=True)
class Steady:
    """Micro-batch j of the first period starts task i at `starts_us[i][j]`, and a period later in each next one.

    `ties[i][j]`: its place among those that start at the same instant. The earliest start is 0.
    """

    placement: Placement
    microbatches_per_period: int  #: of each stream
    period_us: int
    starts_us: tuple[tuple[int, ...], ...]
    ties: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, placement: Placement, num_copies: int, rhythm: Rhythm) -> Steady:
        first = min(rhythm.starts_us)
        nodes = range(0, len(rhythm.starts_us), num_copies)
        starts = tuple(tuple(start - first for start in rhythm.starts_us[i : i + num_copies]) for i in nodes)
        return cls(
            placement, num_copies, rhythm.period_us, starts, tuple(rhythm.ties[i : i + num_copies] for i in nodes)
        )

    @property
    def us_per_microbatch(self) -> Fraction:
        return Fraction(self.period_us, self.microbatches_per_period * self.placement.num_components)

    @property
    def latency_us(self) -> int:
        """From the first start to the last end of a period's micro-batches: fill and drain."""
        tasks = self.placement.tasks
        return max(max(starts) + task.duration_us for task, starts in zip(tasks, self.starts_us, strict=True))

    def flat_starts(self, num_microbatches: int) -> list[list[int]]:
        """For each task the starts of its micro-batches, with no fill or drain closed up."""
        u, streams = self.microbatches_per_period, self.placement.num_components
        return [
            [starts[i % u] + i // u * self.period_us for i in range(len(range(stream, num_microbatches, streams)))]
            for stream, starts in zip(self.placement.component_of, self.starts_us, strict=True)
        ]

    def unroll(self, num_microbatches: int) -> Plan:
        """Each rank does its ops in the order of their flat starts."""
        orders, _ = self._rows(num_microbatches)
        return Plan(self.placement, num_microbatches, tuple(map(tuple, orders)))

    def _rows(self, num_microbatches: int) -> tuple[list[list[Op]], list[list[int]]]:
        """For each rank its ops in order, and their flat starts."""
        rows: list[list[tuple[int, bool, int, Op]]] = [[] for _ in range(self.placement.num_ranks)]
        u, streams = self.microbatches_per_period, self.placement.num_components
        flat = zip(self.placement.tasks, self.placement.component_of, self.flat_starts(num_microbatches), strict=True)
        for (task, stream, starts), ties in zip(flat, self.ties, strict=True):
            for i, start in enumerate(starts):
                op = Op(task.stage, task.kind, i * streams + stream)
                for rank in task.ranks:
                    rows[rank].append((start, task.duration_us > 0, ties[i % u], op))
        for row in rows:
            row.sort()
        return [[op for *_, op in row] for row in rows], [[start for start, *_ in row] for row in rows]

    @cached_property
    def _timeline(self) -> Timeline:
        """Everything at its flat start, for as long as anything may still change."""
        periods = self.latency_us // self.period_us + 3
        num_microbatches = periods * self.microbatches_per_period * self.placement.num_components
        orders, starts = self._rows(num_microbatches)
        placement = self.placement
        duration = {(task.stage, task.kind): task.duration_us for task in placement.tasks}
        ends = [[s + duration[op[:2]] for op, s in zip(*row, strict=True)] for row in zip(orders, starts, strict=True)]
        flat = self.flat_starts(num_microbatches)
        sent = [
            tuple(s + placement.tasks[route.source].duration_us for s in flat[route.source])
            for route in placement.routes
        ]
        arrived = [tuple(s + route.duration_us for s in row) for route, row in zip(placement.routes, sent, strict=True)]
        plan = Plan(placement, num_microbatches, tuple(map(tuple, orders)))
        return Timeline(plan, tuple(map(tuple, starts)), tuple(map(tuple, ends)), tuple(sent), tuple(arrived), ())

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """For each rank the most that it holds when everything starts at its flat start."""
        return tuple(self._timeline.peak_memory_bytes)

    def verify(self) -> None:
        """Raises PlanError where flat starts come before data, overlap on a rank, or hold more than its limit.

        What a replay would put right, a later start, is refused here: the period itself has to be true.
        """
        timeline = self._timeline
        tasks, flat = self.placement.tasks, self.flat_starts(timeline.plan.num_microbatches)
        for (source, target), lag in Loop(self.placement).problem.lags_us.items():
            for made, read in zip(flat[source], flat[target], strict=True):
                if read < made + tasks[source].duration_us + lag:
                    raise PlanError(f"{tasks[target]} starts at {read} µs, before {tasks[source]} has arrived", "cycle")
        for rank, (starts, ends) in enumerate(zip(timeline.starts_us, timeline.ends_us, strict=True)):
            if any(start < end for start, end in zip(starts[1:], ends, strict=False)):
                raise PlanError(f"ops of rank {rank} overlap in the steady state", "cycle")
        for rank, (peak, limit) in enumerate(zip(self.peak_bytes, self.placement.cluster.limit_bytes, strict=True)):
            if limit is not None and peak > limit:
                raise PlanError(f"rank {rank} would hold {peak} bytes in the steady state, limit {limit}", "memory")
        simulate(timeline.plan)  # at one instant, too, nobody waits in a cycle


@dataclass(frozen=True)
class SteadyResult:
    """`bound_us`: no steady state takes less for a micro-batch, however many make a period.

    `proven_for`: whether none of as many micro-batches a period takes less.
    """

    steady: Steady
    bound_us: Fraction
    proven_for: bool

    @property
    def is_optimal(self) -> bool:
        return self.steady.us_per_microbatch <= self.bound_us


def find_steady(
    placement: Placement,
    budget: Budget,
    *,
    microbatches_per_period: int | None = None,
    in_flight: int | None = None,
    seed: int = 0,
    room_bytes: tuple[int, ...] = (),
    progress: Callable[[Steady], None] | None = None,
) -> SteadyResult | None:
    """The steady state of least time per micro-batch, then least latency, then memory; None if none was found.

    None too where not even a micro-batch alone fits, or it leaves something behind on a rank with a limit.
    `in_flight` as in `Window`: the most micro-batches of a stream that a period mixes. `room_bytes` as in `Problem`.
    """
    loop = Loop(placement, room_bytes)
    if any(limit is not None and loop.left_bytes(rank) > 0 for rank, limit in enumerate(loop.limits_bytes)):
        return None
    one_by_one = _one_by_one(loop)
    if one_by_one is None:
        return None
    bound_us, streams = period_bound(placement), placement.num_components
    copies = range(1, _MOST_COPIES + 1) if microbatches_per_period is None else (microbatches_per_period,)
    best: SteadyResult | None = None
    for num_copies in copies:
        below = None if best is None else ceil(best.steady.us_per_microbatch * num_copies * streams)
        search = _Search(loop, num_copies, bound_us * streams, budget, seed, in_flight)
        if num_copies == 1:
            search.take(one_by_one)
        rhythm = search.run(below)
        if rhythm is not None:
            best = SteadyResult(Steady.of(placement, num_copies, rhythm), bound_us, search.is_proven)
            if progress is not None:
                progress(best.steady)
        if budget.is_over or (best is not None and (best.is_optimal or best.steady.period_us == 1)):
            break
    return best


def _one_by_one(loop: Loop) -> Rhythm | None:
    """One micro-batch of each stream after the other; None if even that does not fit."""
    orders = serial(loop.problem)
    starts = start_times(Tables.of(loop.problem), orders)
    if starts is None or not fits(loop.problem, orders):
        return None
    period_us = max(int((starts + loop.problem.durations_us).max()) + max(loop.problem.lags_us.values(), default=0), 1)
    place = {task: i for i, task in enumerate(loop.problem.topological)}
    return Rhythm(period_us, tuple(starts.tolist()), tuple(place[task] for task in range(loop.num_tasks)))


class _Search:
    """For the least period of `num_copies` micro-batches of each stream. None is less than `proven_us`."""

    def __init__(
        self, loop: Loop, num_copies: int, bound_us: Fraction, budget: Budget, seed: int, in_flight: int | None = None
    ) -> None:
        self.loop, self.num_copies, self.seed, self.in_flight = loop, num_copies, seed, in_flight
        self.budget, self.spare = budget.share(_COPIES_S), budget.share(_SOLVE_S)
        self.proven_us = max(ceil(bound_us * num_copies), 1)
        self.best: Rhythm | None = None

    @property
    def is_proven(self) -> bool:
        """Room kept free makes the limits lower than they are: what is not found there proves nothing."""
        return self.best is not None and self.best.period_us <= self.proven_us

    def run(self, below_us: int | None) -> Rhythm | None:
        """The rhythm of the least period, if it is less than `below_us`."""
        low = self.proven_us  # where to look next; nothing was found below it
        step = max(low // _FIRST_STEP, 1)
        tried = low
        while not self._try(tried):
            low, tried, step = tried + 1, tried + step, step * 2
            if self.budget.is_over or (below_us is not None and tried >= below_us):
                break
        if self.best is None and below_us is None:  # one micro-batch after the other always goes
            self.take(Period(self._window(self.num_copies * self.loop.critical_us)).solve(self.spare, self.seed).rhythm)
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
        self._polish()
        return self.best

    def _window(self, period_us: int, latency_us: int | None = None) -> Window:
        return Window(self.loop, self.num_copies, period_us, latency_us, self.in_flight)

    def take(self, rhythm: Rhythm | None) -> None:
        if rhythm is not None and (self.best is None or rhythm.period_us < self.best.period_us):
            self.best = rhythm

    def _try(self, period_us: int) -> bool:
        """Whether there is a rhythm of at most this period now."""
        if self.best is not None and self.best.period_us <= period_us:
            return True
        window = self._window(period_us)
        answer = Period(window).solve(self.budget.share(_SOLVE_S), self.seed)
        self.take(answer.rhythm)
        if answer.rhythm is None and answer.is_proven:
            self._note_none(period_us)
            return False
        if answer.rhythm is None and not self.budget.is_over and self.in_flight is None:  # annealing knows no cuts
            self.take(anneal(window, self.budget, self.seed))
        return self.best is not None and self.best.period_us <= period_us

    def _note_none(self, period_us: int) -> None:
        if not any(self.loop.room_bytes):
            self.proven_us = max(self.proven_us, period_us + 1)

    def _prove(self) -> None:
        """That there is none a µs shorter."""
        while self.best is not None and not self.is_proven and not self.budget.is_over:
            answer = Period(self._window(self.best.period_us - 1)).solve(self.budget.share(_PROVE_S), self.seed)
            if answer.rhythm is None:
                if answer.is_proven:
                    self._note_none(self.best.period_us - 1)
                return
            self.take(answer.rhythm)

    def _polish(self) -> None:
        """The same period with less latency, then with less memory."""
        if self._solve_for("latency"):
            self._solve_for("memory")

    def _solve_for(self, goal: Literal["latency", "memory"]) -> bool:
        """Whether none is better."""
        assert self.best is not None
        model = Period(self._window(self.best.period_us, self._latency_us(self.best)), goal)
        model.hint(self.best.starts_us)
        answer = model.solve(self.budget.share(_POLISH_S), self.seed)
        if answer.rhythm is not None:
            self.best = answer.rhythm
        return answer.is_proven

    def _latency_us(self, rhythm: Rhythm) -> int:
        durations, u = self.loop.durations_us, self.num_copies
        ends = (start + durations[node // u] for node, start in enumerate(rhythm.starts_us))
        return max(ends) - min(rhythm.starts_us)
