"""Compare a plan with what was measured: op by op, and every µs of the difference in makespan by its cause.

The causes come from a replay: the plan is simulated repeatedly, each time with one more measured quantity (see `Part`),
until all are measured. The makespan grows from the planned to the measured one, and the growth of each step is one
cause's part. Only clocks that differ can leave a remainder: according to them, something was read before it arrived.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, pairwise
from statistics import median
from typing import final

from rota.accounting.delays import Place, Readiness, contention_of
from rota.core.errors import PlanError
from rota.core.plan import Plan
from rota.core.simulation import timeline_of
from rota.core.taskgraph import TaskGraph
from rota.core.tasks import Amount, Kind, Op
from rota.core.text import angle_repr, count_text, fitted, table_lines, time_text
from rota.core.timeline import Timeline


class Part(StrEnum):
    """Where a difference in makespan comes from, in the order in which measured quantities replace planned ones."""

    SLOWER = "slower ops"  #: measured durations of ops, without what CORES counts
    CORES = "shared cores"  #: time that ops and launches lost because more ranks were busy than there are cores
    ARRIVALS = "later arrivals"  #: measured durations of transfers
    SHARED_LINKS = "busy links"  #: a transfer on shared links starts some time after it was handed over
    SENDS = "late sends"  #: a transfer starts some time after its data was ready
    LAUNCH = "late starts"  #: an op starts some time after its inputs arrived, or the ranks of a task start apart
    STEP_END = "step end"  #: measured starts and durations of reductions and optimizer steps
    CLOCK = "clocks"  #: according to the clocks, something was read before it arrived


@dataclass(frozen=True, slots=True)
class OpDifference:
    """How much later one op on one rank started, and how much longer it ran, than planned, in µs."""

    rank: int
    op: Op
    later_us: int
    longer_us: int


@dataclass(frozen=True, slots=True)
class KindRow:
    """All ops of one kind of one stage: the planned duration, and the measured median, minimum and maximum."""

    stage: int
    kind: Kind
    num_ops: int
    planned_us: int
    median_us: int
    least_us: int
    most_us: int


#: Each part in words, for text reports.
_DESCRIPTIONS = {
    Part.SLOWER: "ops took longer than planned",
    Part.CORES: "ops and launches waited for a CPU core",
    Part.ARRIVALS: "transfers took longer than planned",
    Part.SHARED_LINKS: "transfers waited for links shared with other ranks",
    Part.SENDS: "outputs were ready but not yet sent",
    Part.LAUNCH: "ops were ready but had not started",
    Part.STEP_END: "reductions and optimizer steps",
    Part.CLOCK: "according to the clocks, data was read before it arrived",
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A planned and a measured timeline, compared.

    Attributes:
        planned: The simulated plan.
        measured: What happened.
        rows: One row per stage and kind, sorted.
        ops: One entry per op and rank, in the order of `Timeline.op_spans`.
        parts_us: Measured minus planned makespan by cause, in µs. The parts add up exactly. Each is the growth of the
            makespan when, in the order of `Part`, one more measured quantity is simulated.
        num_cores: CPU cores that all ranks shared; None if they shared none, or it is not known.
    """

    planned: Timeline
    measured: Timeline
    rows: tuple[KindRow, ...]
    ops: tuple[OpDifference, ...]
    parts_us: dict[Part, int]
    num_cores: int | None = None

    def __str__(self) -> str:
        """One line."""
        planned, measured = self.planned.makespan_us, self.measured.makespan_us
        change = f" ({measured / planned - 1:+.1%})" if planned else ""
        return f"Comparison: planned {time_text(planned)}, measured {time_text(measured)}{change}"

    __repr__ = angle_repr

    @property
    def difference_us(self) -> int:
        """Measured minus planned makespan."""
        return self.measured.makespan_us - self.planned.makespan_us

    def to_text(self, width: int | None = None) -> str:
        """The report that `rota compare` prints, in lines of at most `width` characters; None: of any length."""
        planned, measured = self.planned, self.measured
        change = f"{self.difference_us / planned.makespan_us:+.1%}" if planned.makespan_us else "-"
        lines = [
            *_other_rows(planned.plan, measured.plan),
            "                 planned    measured  difference",
            f"makespan µs {planned.makespan_us:>11,}{measured.makespan_us:>12,}{change:>12}",
            f"{'bubble':<12}{planned.bubble_fraction:>11.1%}{measured.bubble_fraction:>12.1%}"
            f"{100 * (measured.bubble_fraction - planned.bubble_fraction):>+8.1f} pts",
            "",
            *self._part_lines(width),
            *(fitted(line, width) for line in self._core_lines()),
            *self._op_table(width),
        ]
        worst = sorted(self.ops, key=lambda d: -d.longer_us)[:3]
        if worst and worst[0].longer_us > 0:
            longest = ", ".join(f"{d.op} (+{d.longer_us:,} µs)" for d in worst if d.longer_us > 0)
            lines += ["", fitted(f"Longest overruns: {longest}", width)]
        return "\n".join(lines)

    def _part_lines(self, width: int | None) -> list[str]:
        """Each cause of the difference in makespan, with what it means."""
        lines = [
            fitted(f"  {part:<16}{us:>+12,} µs   ({_DESCRIPTIONS[part]})", width, 37)
            for part, us in self.parts_us.items()
            if us
        ]
        title = "Where the difference in makespan comes from (negative: faster than planned):"
        return [fitted(title, width), *lines, ""] if lines else []

    def _core_lines(self) -> list[str]:
        """Why ops took longer than planned, where there were fewer cores than ranks."""
        num_ranks = self.measured.num_ranks
        if self.num_cores is None or num_ranks <= self.num_cores:
            return []
        return [
            f"{count_text(num_ranks, 'rank')} shared {count_text(self.num_cores, 'core')}: the measured times of ops "
            f"contain waiting for a core. Use no more ranks than cores to check planned times.",
        ]

    def _op_table(self, width: int | None) -> list[str]:
        """One row per task: how long its ops were planned to take, and how long they took."""
        rows = [
            (
                f"  {row.stage}{row.kind}",
                f"{row.planned_us:,}",
                f"{row.median_us:,}",
                f"{row.median_us / row.planned_us:.0%}" if row.planned_us else "-",
                f"{row.least_us:,}",
                f"{row.most_us:,}",
                str(row.num_ops),
            )
            for row in self.rows
        ]
        header = ("  op", "planned µs", "median µs", "of plan", "min µs", "max µs", "ops")
        return table_lines(header, rows, left={"  op"}, width=width, optional=("ops", "of plan"))


def _other_rows(planned: Plan, measured: Plan) -> list[str]:
    """A remedy, if the measured micro-batches are not of the size that the plan is for."""
    expected, actual = planned.microbatch_rows, measured.microbatch_rows
    if expected is None or actual is None or expected == actual:
        return []
    return [
        f"The plan is for micro-batches of {count_text(expected, 'row')}, but those measured have {actual}: profile "
        f"with {count_text(actual, 'row')} and plan again, or give each micro-batch {expected}.",
        "",
    ]


def compare(planned: Timeline | Plan, measured: Timeline | Plan, num_cores: int | None = None) -> Comparison:
    """Compare what was measured with what was planned.

    Args:
        planned: The plan, which is simulated, or its timeline.
        measured: The timeline of a run of the same plan; a plan is simulated.
        num_cores: Number of cores, if all ranks share one machine; None: as recorded by the run. If known, part of
            the time that ops ran longer is `Part.CORES`.

    Returns:
        Both timelines, the differences op by op, and the difference in makespan by cause.

    Raises:
        PlanError: The two plans differ in more than their costs.
    """
    planned, measured = timeline_of(planned), timeline_of(measured)
    plan = planned.plan
    if _shape(plan) != _shape(measured.plan):
        raise PlanError(_mismatch(plan, measured.plan), "unknown")
    groups: dict[tuple[int, Kind], list[tuple[int, int]]] = {}
    ops = []
    for before, after in zip(planned.op_spans(), measured.op_spans(), strict=True):
        op = before.work
        assert isinstance(op, Op)
        groups.setdefault((op.stage, op.kind), []).append((before.duration_us, after.duration_us))
        later_us, longer_us = after.start_us - before.start_us, after.duration_us - before.duration_us
        ops.append(OpDifference(before.rank, op, later_us, longer_us))
    rows = []
    for (stage, kind), pairs in sorted(groups.items()):
        planned_us, measured_us = zip(*pairs, strict=True)
        numbers = round(median(planned_us)), round(median(measured_us)), min(measured_us), max(measured_us)
        rows.append(KindRow(stage, kind, len(pairs), *numbers))
    num_cores = num_cores or measured.num_cores
    planned_parts_us, measured_parts_us = (_parts_us(plan, timeline, num_cores) for timeline in (planned, measured))
    parts = {part: measured_parts_us[part] - planned_parts_us[part] for part in Part}
    return Comparison(planned, measured, tuple(rows), tuple(ops), parts, num_cores)


def _shape(plan: Plan) -> tuple[object, ...]:
    """A plan without its costs, which may have been measured again."""
    tasks = tuple((task.stage, task.kind, task.ranks) for task in plan.placement.tasks)
    edges = tuple(edge[:2] for edge in plan.placement.edges)
    return plan.orders, plan.num_microbatches, tasks, edges


def _mismatch(a: Plan, b: Plan) -> str:
    if (a.num_ranks, a.num_microbatches) != (b.num_ranks, b.num_microbatches):
        return (
            f"the timelines are of different plans: {a.num_ranks} ranks and {a.num_microbatches} micro-batches "
            f"against {b.num_ranks} and {b.num_microbatches}; compare two timelines of one plan"
        )
    differing = [r for r, (x, y) in enumerate(zip(a.orders, b.orders, strict=True)) if x != y]
    what = f"rank {differing[0]} runs its ops in another order" if differing else "tasks or edges differ"
    return f"the timelines are of different plans: {what}; compare two timelines of one plan"


# --- the replay -------------------------------------------------------------------------------------------------------


def _parts_us(plan: Plan, timeline: Timeline, num_cores: int | None) -> dict[Part, int]:
    """How much later `timeline` ends than the simulated `plan`, by cause; the parts add up exactly."""
    replay = _Replay(plan, timeline, num_cores)
    ends_us = [*map(replay.makespan_us, range(len(Part))), timeline.makespan_us]
    return {part: after - before for part, (before, after) in zip(Part, pairwise(ends_us), strict=True)}


@final
class _Replay:
    """A graph with one node per op and rank, then two per step end and rank: a reduction and an optimizer step.

    A node waits for its inputs and for the previous op of its rank. As planned, the ranks of one task start together:
    each also waits for what the others need, and transfers that share links are served in the plan's order: each has a
    node, after all others.
    """

    def __init__(self, plan: Plan, timeline: Timeline, num_cores: int | None) -> None:
        self._timeline, self._cores = timeline, contention_of(timeline, num_cores)
        ends = (end.stage for end in timeline.plan.placement.step_ends)
        self._plan = replace(plan, placement=plan.placement.with_step_ends(ends))
        self._readiness = Readiness(timeline)
        self._first = [0, *accumulate(map(len, plan.orders))]
        self._places = [Place(rank, i) for rank, order in enumerate(plan.orders) for i in range(len(order))]

    def makespan_us(self, num_steps: int) -> int:
        """The makespan with the first `num_steps` parts as measured."""
        measured = [*Part][:num_steps]
        durations = self._durations(measured)
        first_service = {} if Part.SHARED_LINKS in measured else self._first_service
        inputs: list[Sequence[tuple[int, int]]] = []
        for place, arrivals in zip(self._places, self._inputs, strict=True):
            before = [(self._node(place) - 1, 0)] if place.position else []
            for source, route, k in arrivals if Part.LAUNCH in measured else self._together(place):
                if route in first_service:
                    before.append((first_service[route] + k, self._lag_us(route, k, measured)))
                elif route < 0:
                    before.append((source, 0))
                else:
                    before.append((source, self._kept_us(route, k, measured) + self._lag_us(route, k, measured)))
            inputs.append(before)
        inputs += [[(node, 0) for node in nodes] for nodes in self._step_end_inputs(Part.STEP_END not in measured)]
        if first_service:
            durations += self._services_us
            inputs += self._service_inputs(measured)
        return max(TaskGraph.of(durations, inputs).earliest().ends_us, default=0)

    def _node(self, place: Place) -> int:
        return self._first[place.rank] + place.position

    # --- what waits for what ----------------------------------------------------------------------------------------

    @cached_property
    def _inputs(self) -> list[list[tuple[int, int, int]]]:
        """For each op's node its inputs: (node, route or -1, position among the route's transfers)."""
        num_components = self._plan.placement.num_components
        result = []
        for place in self._places:
            op = self._readiness.op(place)
            arrivals, k = self._readiness.arrivals(place.rank, op), op.microbatch // num_components
            result.append([(self._node(arrival.maker), arrival.route, k) for arrival in arrivals])
        return result

    def _together(self, place: Place) -> Iterator[tuple[int, int, int]]:
        """Inputs of the op on all of its ranks, and their previous ops."""
        op = self._readiness.op(place)
        ranks = self._plan.placement.tasks[self._plan.placement.index[op.stage, op.kind]].ranks
        if len(ranks) == 1:
            yield from self._inputs[self._node(place)]
            return
        for rank in ranks:
            node = self._first[rank] + self._readiness.positions[rank][self._plan.node(op)]
            yield from self._inputs[node]
            if node > self._first[rank]:
                yield node - 1, -1, 0

    # --- shared links as planned --------------------------------------------------------------------------------------

    @cached_property
    def _first_service(self) -> dict[int, int]:
        """The first node of the transfers on each route that uses shared links."""
        first_nodes = self._plan.shared_transfers.first
        moved = len(self._places) + 2 * len(self._plan.step_end_ranks) - min(first_nodes.values(), default=0)
        return {route: first + moved for route, first in first_nodes.items()}

    @property
    def _services_us(self) -> list[int]:
        """How long each transfer occupies its shared links."""
        plan = self._plan
        routes, column = plan.placement.routes, plan.placement.column
        return [us for r in plan.shared_transfers.first for us in column(routes[r].service_us, plan.microbatches_on(r))]

    def _service_inputs(self, measured: Sequence[Part]) -> list[list[tuple[int, int]]]:
        """For each transfer on shared links its maker, and the one before it in each order of service."""
        plan = self._plan
        inputs = [
            [(self._node(self._place_of_maker(r, k)), self._kept_us(r, k, measured))]
            for r in plan.shared_transfers.first
            for k in range(len(plan.microbatches_on(r)))
        ]
        first, moved = min(plan.shared_transfers.first.values()), min(self._first_service.values())
        for order in plan.served:
            for before, node in pairwise(order):
                inputs[node - first].append((before - first + moved, 0))
        return inputs

    def _place_of_maker(self, route: int, k: int) -> Place:
        """The op that makes the data of a route's k-th transfer, on the rank that sends it."""
        source, rank = self._plan.placement.routes[route].source, self._plan.placement.routes[route].sender
        return Place(rank, self._readiness.positions[rank][self._plan.first_node[source] + k])

    def _step_end_inputs(self, in_turn: bool) -> list[list[int]]:
        """Inputs of each reduction and optimizer step; `in_turn`: one after the other per rank, as planned."""
        plan, num_nodes, result = self._plan, len(self._places), []
        for j, (_, rank) in enumerate(plan.step_end_ranks):
            reduction = plan.num_ops + 2 * j
            for node in (reduction, reduction + 1):
                before = [source for source, _ in plan.graph.inputs(node)]
                ops = [
                    self._first[rank] + self._readiness.positions[rank][source]
                    for source in before
                    if source < plan.num_ops
                ]
                ends = [source for source in before if source >= plan.num_ops]
                if not in_turn:
                    ends = [reduction] if node > reduction else []
                    ops = ops if node == reduction else [*range(self._first[rank], self._first[rank + 1])[-1:]]
                result.append(ops + [num_nodes + source - plan.num_ops for source in ends])
        return result

    # --- durations and lags -----------------------------------------------------------------------------------------

    def _durations(self, measured: Sequence[Part]) -> list[int]:
        """Duration of each node, including the time by which it starts late."""
        plan, result = self._plan, []
        for place in self._places:
            us = planned = plan.duration_us(self._readiness.op(place))
            start, end = self._readiness.start_us(place), self._readiness.end_us(place)
            if Part.SLOWER in measured:
                us = end - start
            full_us, late_us = self._late_us(place)
            if Part.CORES in measured:
                us += full_us
            elif self._cores:
                us -= min(max(us - planned, 0), self._cores.lost_us(start, end))
            result.append(us + (late_us if Part.LAUNCH in measured else 0))
        for i, rank in plan.step_end_ranks:
            step_end = plan.placement.step_ends[i]
            if Part.STEP_END in measured:
                result += self._step_end_us.get((step_end.stage, rank), (0, 0))
            else:
                result += [step_end.reduce_us, step_end.optimizer_us]
        return result

    def _late_us(self, place: Place) -> tuple[int, int]:
        """How long the op was ready, and the one before it done, while other ranks used all cores; how much longer."""
        arrivals = self._readiness.arrivals(place.rank, self._readiness.op(place))
        free_us = self._readiness.end_us(place._replace(position=place.position - 1)) if place.position else 0
        start_us, ready_us = self._readiness.start_us(place), max([free_us, *(a.arrived_us for a in arrivals)])
        full = self._cores.full_intervals(ready_us, start_us) if self._cores and ready_us < start_us else ()
        full_us = sum(b - a for a, b in full)
        return full_us, max(start_us - ready_us, 0) - full_us

    @cached_property
    def _step_end_us(self) -> Mapping[tuple[int, int], tuple[int, int]]:
        """(stage, rank) -> measured duration of the reduction and the optimizer step, with how late each started."""
        durations, timeline, inputs = {}, self._timeline, self._step_end_inputs(in_turn=False)
        ends = [end for column in timeline.ends_us for end in column]
        pairs = [(timeline.plan.placement.step_ends[i].stage, rank) for i, rank in timeline.plan.step_end_ranks]
        measured = dict(zip(pairs, timeline.step_ends_us, strict=True))
        for j, (i, rank) in enumerate(self._plan.step_end_ranks):
            stage = self._plan.placement.step_ends[i].stage
            a, b, c, d = measured.get((stage, rank), (0, 0, 0, 0))
            late = []
            for node, (start, end) in zip(inputs[2 * j : 2 * j + 2], ((a, b), (c, d)), strict=True):
                late.append(max(start - max((ends[before] for before in node), default=0), 0))
                ends.append(end)
            durations[stage, rank] = b - a + late[0], d - c + late[1]
        return durations

    def _lag_us(self, route: int, k: int, measured: Sequence[Part]) -> int:
        """How long a route's k-th transfer travels after it has occupied shared links."""
        planned, timeline = self._plan.placement.routes[route], self._timeline
        us = self._value(planned.duration_us, route, k)
        if Part.ARRIVALS in measured:
            us = max(timeline.arrived_us[route][k] - timeline.sent_us[route][k], 0)
        if planned.shared and Part.SHARED_LINKS not in measured:
            us = max(us - self._value(planned.service_us, route, k), 0)
        return us

    def _kept_us(self, route: int, k: int, measured: Sequence[Part]) -> int:
        """From when its data is made until a route's k-th transfer starts, or waits for shared links."""
        ending = Part.SHARED_LINKS if self._plan.placement.routes[route].shared else Part.SENDS
        if ending not in measured:
            return 0
        made_us = self._readiness.end_us(self._place_of_maker(route, k))
        return max(self._timeline.sent_us[route][k] - made_us, 0)

    def _value(self, amount: Amount, route: int, k: int) -> int:
        """An amount of a route for its k-th transfer."""
        return self._plan.placement.value(amount, self._plan.microbatches_on(route)[k])
