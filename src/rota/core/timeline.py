"""A timeline: when everything in a plan happened, as the simulator predicts or the runtime measures it; its memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from operator import add, itemgetter, lt, neg, sub
from typing import Annotated, Literal, NamedTuple, TypeAlias

import msgspec

from rota.core import reading
from rota.core.errors import FormatError
from rota.core.placement import Placement
from rota.core.plan import Plan, PlanFile, read_file
from rota.core.reading import Positive
from rota.core.tasks import Amount, Kind, Op, Transfer, by_class, value_in
from rota.core.text import angle_repr, time_text


class StepEndWork(NamedTuple):
    """A stage's reduction or optimizer step."""

    stage: int
    what: Literal["reduce", "optimizer"]

    def __str__(self) -> str:
        return f"{self.stage} {self.what}"


class Span(NamedTuple):
    """`work` on `rank` (for a transfer: its sender) from `start_us` to `end_us`."""

    rank: int
    start_us: int
    end_us: int
    work: Op | Transfer | StepEndWork

    @property
    def duration_us(self) -> int:
        """Length in µs."""
        return self.end_us - self.start_us


@dataclass(frozen=True)
class Timeline:
    """The times of a plan, in whole µs from the step's start. The constructor checks nothing; see `refuse_disorder`.

    Attributes:
        plan: The plan.
        starts_us: `starts_us[rank][i]` is the start of `plan.orders[rank][i]`.
        ends_us: `ends_us[rank][i]` is its end.
        sent_us: `sent_us[r][k]` is the start of the transfer on `placement.routes[r]` of the k-th micro-batch of its
            data stream; on shared links, when they began to serve it.
        arrived_us: `arrived_us[r][k]` is its end.
        step_ends_us: `step_ends_us[j]` is the start and end of the reduction, and the start and end of the optimizer
            step, of `plan.step_end_ranks[j]`.
        num_cores: CPU cores that all ranks shared when this was measured; None: they shared none, or it is unknown.
    """

    plan: Plan
    starts_us: tuple[tuple[int, ...], ...]
    ends_us: tuple[tuple[int, ...], ...]
    sent_us: tuple[tuple[int, ...], ...]
    arrived_us: tuple[tuple[int, ...], ...]
    step_ends_us: tuple[tuple[int, int, int, int], ...] = ()
    num_cores: int | None = None

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.plan.num_ranks

    @cached_property
    def makespan_us(self) -> int:
        """When the last op, reduction or optimizer step ends."""
        return max(0, *(ends[-1] for ends in self.ends_us if ends), *(max(end) for end in self.step_ends_us), 0)

    @cached_property
    def span_us(self) -> int:
        """The longest busy window of one rank, first op to last (Zero Bubble's measure)."""
        return max(
            ends[-1] - starts[0] if starts else 0 for starts, ends in zip(self.starts_us, self.ends_us, strict=True)
        )

    @cached_property
    def busy_us(self) -> tuple[int, ...]:
        """Time in ops, per rank."""
        return tuple(sum(e) - sum(s) for s, e in zip(self.starts_us, self.ends_us, strict=True))

    @property
    def idle_us(self) -> tuple[int, ...]:
        """Makespan minus time in ops, per rank."""
        return tuple(self.makespan_us - busy for busy in self.busy_us)

    @property
    def bubble_fraction(self) -> float:
        """Idle time as a fraction of makespan × number of ranks, 0 to 1."""
        return sum(self.idle_us) / (self.makespan_us * self.num_ranks) if self.makespan_us else 0.0

    # --- memory ---------------------------------------------------------------------------------------------------

    def memory_events(self, rank: int) -> list[tuple[int, int]]:
        """Changes of a rank's memory as (key, change in bytes), in ascending order; key // 4 is the time in µs."""
        keyed = [
            (4 * time + kind, change)
            for kind, columns in enumerate(_memory_changes(self, rank))
            for time, change in zip(*columns, strict=True)
        ]
        return sorted(keyed, key=itemgetter(0))  # stable: ops at one instant stay in the rank's order

    def memory(self, rank: int) -> list[tuple[int, int]]:
        """(time in µs, bytes held from then on) of one rank, a step function; at one instant the last level counts."""
        level = self.plan.placement.static_bytes[rank]
        curve = {0: level}
        for key, change in self.memory_events(rank):
            level += change
            curve[key // 4] = level
        return list(curve.items())

    @cached_property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        """The most bytes that each rank holds at any time, static bytes included."""
        return tuple(_peak_bytes(self, rank) for rank in range(self.num_ranks))

    # --- spans ----------------------------------------------------------------------------------------------------

    def op_spans(self) -> Iterator[Span]:
        """Spans of the ops, rank by rank in execution order."""
        for rank, order in enumerate(self.plan.orders):
            for op, start, end in zip(order, self.starts_us[rank], self.ends_us[rank], strict=True):
                yield Span(rank, start, end, op)

    def transfer_spans(self) -> Iterator[Span]:
        """Spans of the transfers, route by route."""
        plan = self.plan
        for r, (starts, ends) in enumerate(zip(self.sent_us, self.arrived_us, strict=True)):
            for m, start, end in zip(plan.microbatches_on(r), starts, ends, strict=True):
                work = plan.placement.transfer(r, m)
                yield Span(work.sender, start, end, work)

    def handed_over_us(self, route: int) -> tuple[int, ...]:
        """When each transfer on `placement.routes[route]` could begin: its op had ended."""
        plan, source = self.plan, self.plan.placement.routes[route].source
        sender = plan.placement.routes[route].sender
        ends = dict(zip(plan.nodes[sender], self.ends_us[sender], strict=True))
        made_us = [ends[node] for node in range(plan.first_node[source], plan.first_node[source + 1])]
        return tuple(map(min, zip(made_us, self.sent_us[route], strict=True)))

    def service_spans(self, shared: int) -> Iterator[Span]:
        """Spans for which transfers occupy the cluster's shared link with this index, by plan from their start on."""
        spans, plan, placement = [], self.plan, self.plan.placement
        for r, route in enumerate(placement.routes):
            if shared in route.shared:
                for m, start, end in zip(plan.microbatches_on(r), self.sent_us[r], self.arrived_us[r], strict=True):
                    end_us = min(start + placement.value(route.service_us, m), max(start, end))
                    spans.append(Span(route.sender, start, end_us, placement.transfer(r, m)))
        yield from sorted(spans, key=lambda span: span.start_us)

    def step_end_spans(self) -> Iterator[Span]:
        """Spans of the reductions and optimizer steps, without those of duration 0."""
        for (i, rank), times in zip(self.plan.step_end_ranks, self.step_ends_us, strict=True):
            stage = self.plan.placement.step_ends[i].stage
            spans = (
                Span(rank, times[0], times[1], StepEndWork(stage, "reduce")),
                Span(rank, times[2], times[3], StepEndWork(stage, "optimizer")),
            )
            yield from (span for span in spans if span.duration_us)

    def spans(self) -> Iterator[Span]:
        """All spans: ops, transfers, then step ends."""
        yield from self.op_spans()
        yield from self.transfer_spans()
        yield from self.step_end_spans()

    def critical_path(self) -> tuple[Span, ...]:
        """The chain of ops, transfers and step ends that determines the makespan, first to last.

        Each span waited for the one before it. Simulated spans are adjacent except for what messages cost before and
        after ops, and with that their durations add up to the makespan; measured ones may have gaps. A transfer
        that the next one waits for, because they share a link, ends where it no longer occupies that link.
        """
        plan = self.plan
        num_nodes = len(plan.graph.durations_us)
        starts, ends, ranks = [0] * num_nodes, [-1] * num_nodes, [0] * num_nodes
        for rank, nodes in enumerate(plan.nodes):
            for node, start, end in zip(nodes, self.starts_us[rank], self.ends_us[rank], strict=True):
                if end > ends[node]:  # the slowest of a task's ranks counts
                    starts[node], ends[node], ranks[node] = start, end, rank
        for j, (_, rank) in enumerate(plan.step_end_ranks):
            node = plan.num_ops + 2 * j
            starts[node : node + 2], ends[node : node + 2] = self.step_ends_us[j][::2], self.step_ends_us[j][1::2]
            ranks[node : node + 2] = rank, rank
        for r, first in plan.shared_transfers.first.items():
            route, after = plan.placement.routes[r], first + len(self.sent_us[r])
            starts[first:after] = self.sent_us[r]
            rest_us = plan.placement.column(by_class(sub, route.duration_us, route.service_us), plan.microbatches_on(r))
            ends[first:after] = map(sub, self.arrived_us[r], rest_us)
            ranks[first:after] = [route.sender] * (after - first)
        path = plan.graph.critical_path(starts, ends)
        spans = [self._span(node, ranks[node], starts[node], ends[node]) for node in path]
        for i, (span, following) in enumerate(pairwise(spans)):
            if isinstance(span.work, Transfer) and isinstance(following.work, Transfer):  # it waits for the link alone
                spans[i] = span._replace(end_us=max(span.start_us, ends[path[i]]))
        return tuple(self._with_transfers(spans))

    def _span(self, node: int, rank: int, start_us: int, end_us: int) -> Span:
        """The span of a node of the plan's graph."""
        plan = self.plan
        if node < plan.num_ops:
            return Span(rank, start_us, end_us, plan.op(node))
        if node < plan.num_ops + 2 * len(plan.step_end_ranks):
            j, is_optimizer = divmod(node - plan.num_ops, 2)
            stage = plan.placement.step_ends[plan.step_end_ranks[j][0]].stage
            return Span(rank, start_us, end_us, StepEndWork(stage, "optimizer" if is_optimizer else "reduce"))
        r, first = next((r, first) for r, first in reversed([*plan.shared_transfers.first.items()]) if first <= node)
        transfer = plan.placement.transfer(r, plan.microbatches_on(r)[node - first])
        return Span(rank, start_us, self.arrived_us[r][node - first], transfer)

    def _with_transfers(self, path: Sequence[Span]) -> Iterator[Span]:
        """Between two ops of a path that a transfer joins, that transfer, if it took time."""
        placement = self.plan.placement
        routes: dict[tuple[int, int], list[int]] = {}
        for r, route in enumerate(placement.routes):
            routes.setdefault((route.source, route.target), []).append(r)
        for i, span in enumerate(path):
            before, work = path[i - 1].work, span.work
            if i and isinstance(before, Op) and isinstance(work, Op) and before.microbatch == work.microbatch:
                edge = placement.index[before.stage, before.kind], placement.index[work.stage, work.kind]
                k = work.microbatch // placement.num_components
                arrived = [(self.arrived_us[r][k], r) for r in routes.get(edge, ())]
                end, last = max(arrived, key=itemgetter(0), default=(0, -1))
                # No transfer if the reader is on the sender's rank too, or if a rank's order bound as late as data.
                if last >= 0 and self.sent_us[last][k] < end <= span.start_us:
                    transfer = placement.transfer(last, work.microbatch)
                    yield Span(transfer.sender, self.sent_us[last][k], end, transfer)
            yield span

    # --- text and files -------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The text of a "timeline" file, with the plan, which `from_json` reads."""
        file = TimelineFile(**{name: getattr(self, name) for name in _SAME_IN_FILES}, **self.plan.to_file())
        return reading.dump("timeline", file, Timeline.from_json)

    def __str__(self) -> str:
        """One line."""
        return f"Timeline of a {self.plan}: {time_text(self.makespan_us)}, bubble {self.bubble_fraction:.1%}"

    __repr__ = angle_repr

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Read what `to_json` wrote. Raises FormatError, PlacementError or PlanError, which name the field."""
        return cls.from_fields(reading.parse(text, "timeline"))

    @classmethod
    def from_fields(cls, document: reading.Field) -> Timeline:
        """Read the fields of a "timeline" file. Raises FormatError, PlacementError or PlanError."""
        file = read_file(document, TimelineFile)
        plan = Plan.from_file(file, document.path)
        per_rank = [len(order) for order in plan.nodes]
        per_route = [plan.first_node[r.source + 1] - plan.first_node[r.source] for r in plan.placement.routes]
        lengths = {"starts_us": per_rank, "ends_us": per_rank, "sent_us": per_route, "arrived_us": per_route}
        for name, expected in {**lengths, "step_ends_us": [4] * len(plan.step_end_ranks)}.items():
            if [*map(len, getattr(file, name))] != expected:
                raise FormatError(f"timeline.{name} does not fit the plan: expected rows of {expected[:8]} entries")
        timeline = cls(
            plan, file.starts_us, file.ends_us, file.sent_us, file.arrived_us, file.step_ends_us, file.num_cores
        )
        timeline.refuse_disorder()
        return timeline

    def refuse_disorder(self) -> None:
        """Check the times of a timeline that was read from a file or from traces.

        Raises:
            FormatError: Ops of a rank overlap or are out of order, or something ends before it starts or starts before
                0.
            PlanError: The plan's orders wait in a cycle, so no run can have these times.
        """
        _ = self.plan.earliest
        for rank, (starts, ends) in enumerate(zip(self.starts_us, self.ends_us, strict=True)):
            times = [time for pair in zip(starts, ends, strict=True) for time in pair]
            for i, (before, after) in enumerate(pairwise(times), 1):
                if after < before:
                    raise FormatError(f"timeline: rank {rank}, op {i // 2 + 1}: {after} µs comes after {before} µs")
        for span in self.spans():
            if span.duration_us < 0:
                raise FormatError(f"timeline: {span.work} ends at {span.end_us} µs, before it starts")
            if span.start_us < 0:
                raise FormatError(f"timeline: {span.work} starts at {span.start_us} µs, before the step")


_Times: TypeAlias = tuple[Annotated[int, msgspec.Meta(ge=0, le=reading.LATEST_US)], ...]


class TimelineFile(PlanFile, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A timeline in JSON: its plan, and the times of ops, transfers and step ends."""

    makespan_us: int
    starts_us: tuple[_Times, ...]
    ends_us: tuple[_Times, ...]
    sent_us: tuple[_Times, ...]
    arrived_us: tuple[_Times, ...]
    step_ends_us: tuple[tuple[int, int, int, int], ...]
    num_cores: Positive | None = None


_SAME_IN_FILES = ("makespan_us", "starts_us", "ends_us", "sent_us", "arrived_us", "step_ends_us", "num_cores")


# --- memory -----------------------------------------------------------------------------------------------------------
# A rank holds its static bytes, the bytes that its ops hold, received bytes from the transfer's start to the end of the
# op that reads them, sent bytes from the end of their op until the transfer ends, and `peak_bytes` while an op runs. At
# one instant, ends free memory before starts allocate it; ops of duration 0 count one after the other, in the rank's
# order.

# Changes at one instant come in this order.
_TRANSFER_ENDS, _OP_ENDS, _TRANSFER_STARTS, _OP = range(4)

_Changes: TypeAlias = tuple[Sequence[int], Sequence[int]]  # times and, beside them, changes in bytes


def is_op_event(key: int) -> bool:
    """Whether an event of `Timeline.memory_events` is the start or end of an op, rather than of a transfer."""
    return key % 4 in (_OP_ENDS, _OP)


def _peak_bytes(timeline: Timeline, rank: int) -> int:
    times, changes = ([*chain.from_iterable(columns)] for columns in zip(*_memory_changes(timeline, rank), strict=True))
    held = most = timeline.plan.placement.static_bytes[rank]
    for i in sorted(range(len(times)), key=times.__getitem__):  # stable: at one instant the first kind comes first
        held += changes[i]
        if held > most:
            most = held
    return most


def _memory_changes(timeline: Timeline, rank: int) -> tuple[_Changes, _Changes, _Changes, _Changes]:
    """Changes of a rank's memory by kind, in the order of the kinds at one instant; each kind in the rank's order."""
    transfer_ends, transfer_starts = _transfer_changes(timeline, rank)
    at_start, at_end = _op_changes(timeline.plan, rank)
    starts_us, ends_us = timeline.starts_us[rank], timeline.ends_us[rank]
    if all(map(lt, starts_us, ends_us)):
        return transfer_ends, (ends_us, at_end), transfer_starts, (starts_us, at_start)
    op_ends: list[tuple[int, int]] = []
    ops: list[tuple[int, int]] = []
    for start, end, taken, freed in zip(starts_us, ends_us, at_start, at_end, strict=True):
        ops.append((start, taken))
        (op_ends if end > start else ops).append((end, freed))
    return transfer_ends, _columns(op_ends), transfer_starts, _columns(ops)


def _columns(pairs: Sequence[tuple[int, int]]) -> _Changes:
    return [time for time, _ in pairs], [change for _, change in pairs]


def _transfer_changes(timeline: Timeline, rank: int) -> tuple[_Changes, _Changes]:
    """At the ends and at the starts of a rank's transfers."""
    plan, columns = timeline.plan, (timeline.plan.placement.routes, timeline.sent_us, timeline.arrived_us)
    end_of = dict(zip(plan.nodes[rank], timeline.ends_us[rank], strict=True)) if plan.shared_transfers.first else {}
    freed: tuple[list[int], list[int]] = [], []
    taken: tuple[list[int], list[int]] = [], []
    for r, (route, starts, ends) in enumerate(zip(*columns, strict=True)):
        if rank not in (route.sender, route.receiver) or route.num_bytes == 0:
            continue
        sizes = plan.placement.column(route.num_bytes, plan.microbatches_on(r))
        if rank == route.sender and route.shared:  # the sender holds the bytes while they wait for the shared links
            nodes = range(plan.first_node[route.source], plan.first_node[route.source + 1])
            starts = tuple(map(min, map(end_of.__getitem__, nodes), starts))
        taken[0].extend(starts)
        taken[1].extend(sizes)
        if rank == route.sender:  # the receiver's bytes are freed by the op that reads them
            freed[0].extend(ends)
            freed[1].extend(map(neg, sizes))
    return freed, taken


def _op_changes(plan: Plan, rank: int) -> tuple[list[int], list[int]]:
    """Changes at the start and at the end of each op, in the rank's order."""
    placement, num_classes = plan.placement, plan.placement.num_classes
    at_start: dict[int, int] = {}  # by variant
    at_end: dict[int, int] = {}
    for task, amounts in task_changes(placement, rank).items():
        first = placement.index[task] * num_classes
        for changes, amount in zip((at_start, at_end), amounts, strict=True):
            changes.update((first + c, value_in(amount, c)) for c in range(num_classes))
    variants = [*map(plan.variants.__getitem__, plan.nodes[rank])]
    return [*map(at_start.__getitem__, variants)], [*map(at_end.__getitem__, variants)]


def task_changes(placement: Placement, rank: int) -> dict[tuple[int, Kind], tuple[Amount, Amount]]:
    """(stage, kind) -> change of the bytes held on `rank` at the start and at the end of an op."""
    tasks = {i: task for i, task in enumerate(placement.tasks) if rank in task.ranks}
    received: dict[int, Amount] = dict.fromkeys(tasks, 0)
    for route in placement.routes:
        if route.receiver == rank:
            received[route.target] = by_class(add, received[route.target], route.num_bytes)
    changes = {}
    for i, task in tasks.items():
        amounts = task.held_bytes, task.peak_bytes
        at_start = by_class(lambda held, peak: max(held, 0) + peak, *amounts)
        at_end = by_class(lambda held, peak, read: min(held, 0) - peak - read, *amounts, received[i])
        changes[task.stage, task.kind] = at_start, at_end
    return changes
