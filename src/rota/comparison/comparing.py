"""Planned against measured, op by op."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from rota import notebook
from rota.comparison.parts import Part, parts_us
from rota.errors import PlanError
from rota.plan import Plan
from rota.simulation import timeline_of
from rota.tasks import Kind, Op
from rota.timeline import Timeline
from rota.units import count_text


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


#: What each part says, for one who reads it the first time.
_WORDS = {
    Part.SLOWER: "the plan simulated with the measured op times",
    Part.CORES: "of these, and of launch gaps: more ranks are busy than cores",
    Part.ARRIVALS: "and with the measured transfer times",
    Part.CONTENTION: "of these, because transfers share a link",
    Part.SENDS: "made, but not yet on its way",
    Part.LAUNCH: "ready, but not started yet",
    Part.STEP_END: "reductions and optimizer steps",
    Part.CLOCK: "read before it arrived, by the clocks",
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """`parts_us`: measured less planned makespan, every µs of it by its cause. The parts add up exactly.

    Each is what the makespan grows by if, in this order, one thing more is simulated as it was measured (see `Part`).
    """

    planned: Timeline
    measured: Timeline
    rows: tuple[KindRow, ...]
    ops: tuple[OpDifference, ...]
    parts_us: dict[Part, int]

    @property
    def difference_us(self) -> int:
        return self.measured.makespan_us - self.planned.makespan_us

    @property
    def slower_ops_us(self) -> int:
        """What ops that take longer, or wait for a core, add to the makespan."""
        return self.parts_us[Part.SLOWER] + self.parts_us[Part.CORES]

    @property
    def later_arrivals_us(self) -> int:
        """What it grows by further with the measured transfer times."""
        return self.parts_us[Part.ARRIVALS] + self.parts_us[Part.CONTENTION]

    @property
    def rest_us(self) -> int:
        """What neither explains: the other parts."""
        return self.difference_us - self.slower_ops_us - self.later_arrivals_us

    def to_text(self) -> str:
        """The table that `rota compare` prints."""
        planned, measured = self.planned, self.measured
        lines = [
            *_other_rows(planned.plan, measured.plan),
            "                 planned    measured  difference",
            _row("makespan µs", planned.makespan_us, measured.makespan_us),
            f"{'bubble':<12}{planned.bubble_fraction:>11.1%}{measured.bubble_fraction:>12.1%}"
            f"{100 * (measured.bubble_fraction - planned.bubble_fraction):>+8.1f} pts",
            "",
            "Where the difference in makespan comes from:",
            *(f"  {part:<16}{us:>+12,} µs   ({_WORDS[part]})" for part, us in self.parts_us.items()),
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


def _other_rows(planned: Plan, measured: Plan) -> list[str]:
    """Says so where the micro-batches that were run are of another size than those that the plan is for."""
    expected, seen = planned.microbatch_rows, measured.microbatch_rows
    if expected is None or seen is None or expected == seen:
        return []
    return [
        f"The plan is for micro-batches of {count_text(expected, 'row')}, but those measured have {seen}: profile with "
        f"{count_text(seen, 'row')} and plan again, or give each micro-batch {expected}.",
        "",
    ]


def _row(name: str, planned: int, measured: int) -> str:
    change = f"{(measured - planned) / planned:+.1%}" if planned else "-"
    return f"{name:<12}{planned:>11,}{measured:>12,}{change:>12}"


def compare(planned: Timeline | Plan, measured: Timeline | Plan, num_cores: int | None = None) -> Comparison:
    """A plan is simulated first. Raises PlanError where the two are not of one plan.

    With `num_cores`, of the one machine that all ranks share, part of what ops take longer is `Part.CORES`.
    """
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
    expected_us, seen_us = parts_us(plan, planned, num_cores), parts_us(plan, measured, num_cores)
    parts = {part: seen_us[part] - expected_us[part] for part in Part}
    return Comparison(planned, measured, tuple(rows), tuple(ops), parts)


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
