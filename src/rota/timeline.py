"""When everything of a plan happened: what the simulator predicts and the runtime measures, in one type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from rota import memory, reading
from rota.errors import FormatError
from rota.plan import Plan, Transfer
from rota.tasks import Op


class StepEndWork(NamedTuple):
    """A stage's reduction or optimizer step."""

    stage: int
    what: Literal["reduce", "optimizer"]

    def __str__(self) -> str:
        return f"{self.stage} {self.what}"


class Span(NamedTuple):
    """`work` on `rank` (a transfer: its sender) from `start_us` to `end_us`."""

    rank: int
    start_us: int
    end_us: int
    work: Op | Transfer | StepEndWork

    @property
    def duration_us(self) -> int:
        return self.end_us - self.start_us


@dataclass(frozen=True)
class Timeline:
    """Times in whole µs from the step's start, as columns beside the plan.

    `starts_us[rank][i]` and `ends_us[rank][i]` belong to `plan.orders[rank][i]`; `sent_us[r][k]` and
    `arrived_us[r][k]` to `placement.routes[r]` and the k-th micro-batch of its stream; `step_ends_us[j]` is the
    (start, end) of the reduction and the (start, end) of the optimizer step of `plan.step_end_ranks[j]`.
    """

    plan: Plan
    starts_us: tuple[tuple[int, ...], ...]
    ends_us: tuple[tuple[int, ...], ...]
    sent_us: tuple[tuple[int, ...], ...]
    arrived_us: tuple[tuple[int, ...], ...]
    step_ends_us: tuple[tuple[int, int, int, int], ...] = ()

    @property
    def num_ranks(self) -> int:
        return self.plan.num_ranks

    @cached_property
    def makespan_us(self) -> int:
        """When the last op, reduction and optimizer step has ended."""
        return max(0, *(ends[-1] for ends in self.ends_us if ends), *(max(end) for end in self.step_ends_us), 0)

    @cached_property
    def span_us(self) -> int:
        """The longest busy window of one rank, first op to last (Zero Bubble's measure)."""
        return max(e[-1] - s[0] if s else 0 for s, e in zip(self.starts_us, self.ends_us, strict=True))

    @cached_property
    def busy_us(self) -> tuple[int, ...]:
        """Time in ops, for each rank."""
        return tuple(sum(e) - sum(s) for s, e in zip(self.starts_us, self.ends_us, strict=True))

    @property
    def idle_us(self) -> tuple[int, ...]:
        """Makespan less time in ops, for each rank."""
        return tuple(self.makespan_us - busy for busy in self.busy_us)

    @property
    def bubble_fraction(self) -> float:
        """Idle share of makespan x ranks, 0 to 1."""
        return sum(self.idle_us) / (self.makespan_us * self.num_ranks) if self.makespan_us else 0.0

    # --- memory ---------------------------------------------------------------------------------------------------

    def memory_events(self, rank: int) -> list[tuple[int, int]]:
        """See `rota.memory.events`."""
        return memory.events(self.plan, rank, self.starts_us[rank], self.ends_us[rank], self.sent_us, self.arrived_us)

    def memory(self, rank: int) -> list[tuple[int, int]]:
        """(time in µs, bytes held from then on) of one rank."""
        return memory.levels(self.plan.placement.static_bytes[rank], self.memory_events(rank))

    @cached_property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        """The most that each rank holds at any time, static bytes included."""
        static = self.plan.placement.static_bytes
        return tuple(memory.peak_bytes(static[rank], self.memory_events(rank)) for rank in range(self.num_ranks))

    # --- spans ----------------------------------------------------------------------------------------------------

    def op_spans(self) -> Iterator[Span]:
        """The ops, rank by rank in execution order."""
        for rank, order in enumerate(self.plan.orders):
            for op, start, end in zip(order, self.starts_us[rank], self.ends_us[rank], strict=True):
                yield Span(rank, start, end, op)

    def transfer_spans(self) -> Iterator[Span]:
        """The transfers, route by route."""
        plan, tasks = self.plan, self.plan.placement.tasks
        for route, starts, ends in zip(plan.placement.routes, self.sent_us, self.arrived_us, strict=True):
            a, b = tasks[route.source], tasks[route.target]
            batches = plan.placement.microbatches(a.stage, plan.num_microbatches)
            for m, start, end in zip(batches, starts, ends, strict=True):
                work = Transfer(Op(a.stage, a.kind, m), Op(b.stage, b.kind, m), route.sender, route.receiver, route[4])
                yield Span(route.sender, start, end, work)

    def step_end_spans(self) -> Iterator[Span]:
        """The reductions and optimizer steps, those that take time."""
        for (i, rank), times in zip(self.plan.step_end_ranks, self.step_ends_us, strict=True):
            stage = self.plan.placement.step_ends[i].stage
            spans = (
                Span(rank, times[0], times[1], StepEndWork(stage, "reduce")),
                Span(rank, times[2], times[3], StepEndWork(stage, "optimizer")),
            )
            yield from (span for span in spans if span.duration_us)

    def spans(self) -> Iterator[Span]:
        """All of them."""
        yield from self.op_spans()
        yield from self.transfer_spans()
        yield from self.step_end_spans()

    def critical_path(self) -> tuple[Span, ...]:
        """The chain of ops, transfers and step ends that made the makespan as long as it is, first to last.

        Each span waited for the one before it. Simulated spans touch, so that their durations add up to the
        makespan; measured ones may have gaps between them.
        """
        plan = self.plan
        node_spans: dict[int, Span] = {}
        for (rank, order), nodes in zip(enumerate(plan.orders), plan.nodes, strict=True):
            for i, (op, node) in enumerate(zip(order, nodes, strict=True)):
                start, end = self.starts_us[rank][i], self.ends_us[rank][i]
                if node not in node_spans or end > node_spans[node].end_us:  # the slowest of a task's ranks counts
                    node_spans[node] = Span(rank, start, end, op)
        for j, (i, rank) in enumerate(plan.step_end_ranks):
            stage, times = plan.placement.step_ends[i].stage, self.step_ends_us[j]
            first = plan.num_ops + 2 * j
            node_spans[first] = Span(rank, times[0], times[1], StepEndWork(stage, "reduce"))
            node_spans[first + 1] = Span(rank, times[2], times[3], StepEndWork(stage, "optimizer"))
        spans = [node_spans[node] for node in range(len(node_spans))]
        starts, ends = [span.start_us for span in spans], [span.end_us for span in spans]
        path = [node_spans[n] for n in plan.graph.critical_path(starts, ends)]
        return tuple(self._with_transfers(path))

    def _with_transfers(self, path: Sequence[Span]) -> Iterator[Span]:
        """Between two ops of a path that a transfer joins, that transfer, if it took time."""
        joins: dict[tuple[object, object], Span] = {}
        wanted = {(a.work, b.work) for a, b in pairwise(path)}
        for span in self.transfer_spans():
            if isinstance(span.work, Transfer) and (span.work.source, span.work.target) in wanted:
                key = (span.work.source, span.work.target)
                if key not in joins or span.end_us > joins[key].end_us:
                    joins[key] = span
        for i, span in enumerate(path):
            join = joins.get((path[i - 1].work, span.work)) if i else None
            # Where the reader is on the sender's rank too, or an order binds as late as the data, nothing travelled.
            if join is not None and join.duration_us and join.end_us <= span.start_us:
                yield join
            yield span

    # --- text -----------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The plan and the times; `from_json` reads it back."""
        columns = ("starts_us", "ends_us", "sent_us", "arrived_us", "step_ends_us")
        fields: dict[str, object] = {name: [list(c) for c in getattr(self, name)] for name in columns}
        plan = {
            "num_microbatches": self.plan.num_microbatches,
            "orders": [" ".join(map(str, order)) for order in self.plan.orders],
            **self.plan.placement.to_fields(),
        }
        return reading.dump("timeline", {"makespan_us": self.makespan_us, **fields, **plan})

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Raises FormatError, PlacementError or PlanError, naming the field."""
        document = reading.parse(text, "timeline")
        plan = Plan.from_fields(document)
        per_rank = [len(order) for order in plan.nodes]
        per_route = [plan.first_node[r.source + 1] - plan.first_node[r.source] for r in plan.placement.routes]

        def columns(name: str, lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
            rows = tuple(row.integers(0) for row in document[name])
            if [len(row) for row in rows] != list(lengths):
                raise FormatError(f"timeline.{name} does not fit the plan: expected rows of {lengths[:8]} entries")
            return rows

        ends = columns("step_ends_us", [4] * len(plan.step_end_ranks))
        timeline = cls(
            plan,
            columns("starts_us", per_rank),
            columns("ends_us", per_rank),
            columns("sent_us", per_route),
            columns("arrived_us", per_route),
            tuple((a, b, c, d) for a, b, c, d in ends),
        )
        timeline._refuse_disorder()
        return timeline

    def _refuse_disorder(self) -> None:
        """A rank's ops follow each other; nothing ends before it starts."""
        for rank, (starts, ends) in enumerate(zip(self.starts_us, self.ends_us, strict=True)):
            times = [time for pair in zip(starts, ends, strict=True) for time in pair]
            for i, (before, after) in enumerate(pairwise(times)):
                if after < before:
                    raise FormatError(f"timeline: rank {rank}, op {i // 2 + 1}: {after} µs comes after {before} µs")
        for span in self.spans():
            if span.duration_us < 0:
                raise FormatError(f"timeline: {span.work} ends at {span.end_us} µs, before it starts")
