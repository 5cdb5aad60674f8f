"""A steady state: what starts when in a period that repeats, what it holds, and the plans that it makes."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from rota.errors import PlanError
from rota.placement import Placement
from rota.plan import Plan
from rota.search.periodic.loop import Loop
from rota.search.periodic.retiming import Rhythm
from rota.simulation import simulate
from rota.tasks import Op
from rota.timeline import Timeline


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

    def most_bytes(self, num_microbatches: int | None = None) -> tuple[int, ...]:
        """For each rank the most that it holds at flat starts or in the unrolled plan of so many micro-batches.

        A plan's ops start as soon as they can, thus earlier than at flat starts, and what was sent waits longer then.
        None: of plans that fill, that have just filled, and that go on for long.
        """
        if not any(route.num_bytes for route in self.placement.routes):
            return self.peak_bytes
        a_period, filling = (
            self.microbatches_per_period * self.placement.num_components,
            self.latency_us // self.period_us,
        )
        lengths = [a_period * periods for periods in (1, filling + 1, filling + 2, 4 * filling + 8)]
        peaks = [self.peak_bytes]
        for length in lengths if num_microbatches is None else [num_microbatches]:
            peaks.append(simulate(self.unroll(length)).peak_memory_bytes)
        return tuple(map(max, *peaks))

    def over_bytes(self, num_microbatches: int | None = None) -> tuple[int, ...]:
        """By how much each rank is over its limit then."""
        limits = self.placement.cluster.limit_bytes
        peaks = self.most_bytes(num_microbatches)
        return tuple(0 if limit is None else max(peak - limit, 0) for peak, limit in zip(peaks, limits, strict=True))

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
