"""Planned against measured, op by op, and where the difference in makespan comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rota import notebook
from rota.errors import PlanError
from rota.plan import Plan
from rota.simulation import timeline_of
from rota.taskgraph import TaskGraph
from rota.tasks import Kind, Op
from rota.timeline import Timeline


@dataclass(frozen=True, slots=True)
class OpDifference:
    """One op on one rank: how much later it started and how much longer it took than planned."""

    rank: int
    op: Op
    later_us: int
    longer_us: int


@dataclass(frozen=True, slots=True)
class KindRow:
    """All ops of one kind of one stage: planned time, and the median and extremes measured."""

    stage: int
    kind: Kind
    num_ops: int
    planned_us: int
    median_us: int
    least_us: int
    most_us: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """`slower_ops_us + later_arrivals_us + rest_us` is exactly measured less planned makespan.

    `slower_ops_us`: what the makespan grows by if the plan is simulated with the measured op times;
    `later_arrivals_us`: what it grows by further with the measured transfer times; `rest_us`: what neither explains
    (launch gaps, contention, the step's end).
    """

    planned: Timeline
    measured: Timeline
    rows: tuple[KindRow, ...]
    ops: tuple[OpDifference, ...]
    slower_ops_us: int
    later_arrivals_us: int
    rest_us: int

    @property
    def difference_us(self) -> int:
        return self.measured.makespan_us - self.planned.makespan_us

    def to_text(self) -> str:
        """The table that `rota compare` prints."""
        planned, measured = self.planned, self.measured
        lines = [
            "                 planned    measured  difference",
            _row("makespan µs", planned.makespan_us, measured.makespan_us),
            f"{'bubble':<12}{planned.bubble_fraction:>11.1%}{measured.bubble_fraction:>12.1%}"
            f"{100 * (measured.bubble_fraction - planned.bubble_fraction):>+8.1f} pts",
            "",
            "Where the difference in makespan comes from:",
            f"  {'slower ops':<16}{self.slower_ops_us:>+12,} µs   (the plan simulated with the measured op times)",
            f"  {'later arrivals':<16}{self.later_arrivals_us:>+12,} µs   (and with the measured transfer times)",
            f"  {'the rest':<16}{self.rest_us:>+12,} µs   (launch gaps, contention, the step's end)",
            "",
            "  op      planned µs   median µs    of planned    least … most µs",
        ]
        for row in self.rows:
            ratio = f"{row.median_us / row.planned_us:.0%}" if row.planned_us else "-"
            lines.append(
                f"  {row.stage}{row.kind:<4}{row.planned_us:>13,}{row.median_us:>12,}{ratio:>14}"
                f"    {row.least_us:,} … {row.most_us:,}  ({row.num_ops})"
            )
        worst = sorted(self.ops, key=lambda d: -d.longer_us)[:3]
        if worst and worst[0].longer_us > 0:
            told = ", ".join(f"{d.op} (+{d.longer_us:,} µs)" for d in worst if d.longer_us > 0)
            lines += ["", f"Longest beyond plan: {told}"]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Both timelines, one scale, and the table."""
        until = max(self.planned.makespan_us, self.measured.makespan_us)
        pictures = self.planned.to_snippet("Planned", until), self.measured.to_snippet("Measured", until)
        return notebook.document(*pictures, notebook.preformatted(self.to_text()))


def _row(name: str, planned: int, measured: int) -> str:
    change = f"{(measured - planned) / planned:+.1%}" if planned else "-"
    return f"{name:<12}{planned:>11,}{measured:>12,}{change:>12}"


def compare(planned: Timeline | Plan, measured: Timeline | Plan) -> Comparison:
    """A plan is simulated first. Raises PlanError where the two are not of one plan."""
    planned, measured = timeline_of(planned), timeline_of(measured)
    plan = planned.plan
    if _shape(plan) != _shape(measured.plan):
        raise PlanError(_tell_other_plan(plan, measured.plan), "unknown")
    groups: dict[tuple[int, Kind], list[tuple[int, int]]] = {}
    ops = []
    for before, after in zip(planned.op_spans(), measured.op_spans(), strict=True):
        op = before.work
        assert isinstance(op, Op)
        groups.setdefault((op.stage, op.kind), []).append((before.duration_us, after.duration_us))
        ops.append(
            OpDifference(before.rank, op, after.start_us - before.start_us, after.duration_us - before.duration_us)
        )
    rows = []
    for (stage, kind), pairs in sorted(groups.items()):
        expected, seen = [a for a, _ in pairs], [b for _, b in pairs]
        numbers = round(median(expected)), round(median(seen)), min(seen), max(seen)
        rows.append(KindRow(stage, kind, len(pairs), *numbers))
    with_ops = _replay(planned, measured, transfers=False)
    with_both = _replay(planned, measured, transfers=True)
    return Comparison(
        planned,
        measured,
        tuple(rows),
        tuple(ops),
        slower_ops_us=with_ops - planned.makespan_us,
        later_arrivals_us=with_both - with_ops,
        rest_us=measured.makespan_us - with_both,
    )


def _replay(planned: Timeline, measured: Timeline, transfers: bool) -> int:
    """The makespan of the plan with measured op durations and, if asked, measured transfer durations."""
    plan = planned.plan
    durations = list(plan.graph.durations_us)
    longest: dict[int, int] = {}
    for rank, nodes in enumerate(plan.nodes):
        for node, start, end in zip(nodes, measured.starts_us[rank], measured.ends_us[rank], strict=True):
            longest[node] = max(longest.get(node, 0), end - start)
    for node, duration in longest.items():
        durations[node] = duration
    lags = _transfer_lags(measured) if transfers else {}
    inputs: Sequence[Sequence[tuple[int, int]]] = plan.graph.inputs
    if lags:
        inputs = [[(a, lags.get((a, b), lag)) for a, lag in edges] for b, edges in enumerate(inputs)]
    return max(TaskGraph(durations, inputs).earliest().ends_us, default=0)


def _transfer_lags(timeline: Timeline) -> dict[tuple[int, int], int]:
    """(producing node, reading node) -> the longest that any of the edge's transfers took."""
    plan = timeline.plan
    lags: dict[tuple[int, int], int] = {}
    for route, sent, arrived in zip(plan.placement.routes, timeline.sent_us, timeline.arrived_us, strict=True):
        source, target = plan.first_node[route.source], plan.first_node[route.target]
        for k, (start, end) in enumerate(zip(sent, arrived, strict=True)):
            lags[source + k, target + k] = max(lags.get((source + k, target + k), 0), end - start)
    return lags


def _shape(plan: Plan) -> tuple[object, ...]:
    """All of a plan but its costs: those may have been measured anew."""
    tasks = tuple((task.stage, task.kind, task.ranks) for task in plan.placement.tasks)
    edges = tuple(edge[:2] for edge in plan.placement.edges)
    return plan.orders, plan.num_microbatches, tasks, edges


def _tell_other_plan(a: Plan, b: Plan) -> str:
    if (a.num_ranks, a.num_microbatches) != (b.num_ranks, b.num_microbatches):
        return (
            f"the timelines are of different plans: {a.num_ranks} ranks and {a.num_microbatches} micro-batches "
            f"against {b.num_ranks} and {b.num_microbatches}; compare two timelines of one plan"
        )
    differing = [r for r, (x, y) in enumerate(zip(a.orders, b.orders, strict=True)) if x != y]
    what = f"rank {differing[0]} does another order" if differing else "tasks or edges differ"
    return f"the timelines are of different plans: {what}; compare two timelines of one plan"
