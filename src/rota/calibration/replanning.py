"""The same model planned anew by what it takes in truth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import mean, median_low
from typing import NamedTuple

from rota.calibration.measured import calibrated
from rota.checking import check
from rota.errors import PlanError
from rota.plan import Plan
from rota.schedules import NAMED
from rota.schedules.defined import named_plans
from rota.simulation import simulate
from rota.timeline import Timeline
from rota.units import count_text

WORTH_IT = 0.01  # a gain below this part of the makespan is not worth another plan
UNEVEN = 1.10  # from here on, in parts of the mean, a rank has too much to do
_MOST_ROWS = 6


class Candidate(NamedTuple):
    """Another plan for the same placement, and what it would take."""

    name: str
    plan: Plan
    makespan_us: int


@dataclass(frozen=True)
class Calibration:
    """What the old plan was to take, what it took, and what it and others are predicted to take by measured costs.

    `plan`: the old orders with the new costs. `candidates`: others that fit, fastest first.
    """

    planned_us: int
    measured_us: tuple[int, ...]
    plan: Plan
    candidates: tuple[Candidate, ...]

    @cached_property
    def predicted_us(self) -> int:
        """Of the old orders with the new costs."""
        return simulate(self.plan).makespan_us

    @property
    def gain(self) -> float:
        """Of the best candidate, as a part of what the old orders are predicted to take; 0 where none is faster."""
        best = min((one.makespan_us for one in self.candidates), default=self.predicted_us)
        return max(1 - best / self.predicted_us, 0.0) if self.predicted_us else 0.0

    @property
    def chosen(self) -> Plan:
        """The best candidate where it is worth it, else the old orders; with the new costs."""
        return self.candidates[0].plan if self.gain >= WORTH_IT else self.plan

    @property
    def unevenness(self) -> tuple[int, float]:
        """The rank with most to do for a micro-batch, and how much that is in parts of the mean."""
        loads = [
            sum(task.duration_us for task in self.plan.placement.tasks if rank in task.ranks)
            for rank in range(self.plan.num_ranks)
        ]
        most = max(range(len(loads)), key=loads.__getitem__)
        return most, loads[most] / mean(loads) if any(loads) else 1.0

    def with_plan(self, name: str, plan: Plan) -> Calibration:
        """With one candidate more, for the new costs. Raises PlanError where it must not run."""
        check(plan)
        plan = replace(plan, usage=self.plan.usage)
        found = [*self.candidates, Candidate(name, plan, simulate(plan).makespan_us)]
        return replace(self, candidates=tuple(sorted(found, key=lambda one: one.makespan_us)))

    def to_text(self) -> str:
        """What `rota calibrate` prints."""
        measured = median_low(self.measured_us)
        rows = [
            ("planned, by the old costs", self.planned_us),
            (f"measured ({_of_steps(len(self.measured_us))})", measured),
            ("the same orders, by the new costs", self.predicted_us),
        ]
        rows += [(f"  {one.name}", one.makespan_us) for one in self.candidates[:_MOST_ROWS]]
        lines = [f"{'makespan':<36}{'µs':>12}   of measured"]
        lines += [f"{what:<36}{us:>12,}{us / measured - 1:>+13.1%}" if measured else what for what, us in rows]
        return "\n".join([*lines, "", self.verdict()])

    def verdict(self) -> str:
        """Whether to keep the plan, and whether to cut anew."""
        if self.gain >= WORTH_IT:
            best = self.candidates[0]
            told = f"Take {best.name}: {self.gain:.1%} faster than the same orders, by the new costs."
        elif self.candidates:
            told = f"Keep the plan: of {count_text(len(self.candidates), 'other')} none is {WORTH_IT:.0%} faster."
        else:
            told = "Keep the plan: no other schedule fits this placement."
        rank, share = self.unevenness
        if share > UNEVEN:
            told += f"\nRank {rank} has {share - 1:.0%} more to do than the mean, which no order can mend"
            told += self._cut_anew(rank)
        return told

    def _cut_anew(self, rank: int) -> str:
        """How, if there is anything to cut on the rank: its stages have a layer at least."""
        stages, usage = self.plan.placement.stages_on(rank), self.plan.usage
        num_layers = () if usage is None else usage.num_layers
        if num_layers and sum(num_layers[stage % len(num_layers)] for stage in stages) == 1:
            return ", nor another cut: it has a single layer. Divide that in the model, by a CutPoint in it."
        several = "" if num_layers or len(stages) > 1 else ", if it has more than one layer"
        return f": cut anew{several}, by\n`{_command(self.plan)}`,\nof what `rota profile` measures."


def calibrate(
    timelines: Sequence[Timeline], schedule: str | None = None, looking_at: Callable[[str], None] = lambda _: None
) -> Calibration:
    """The first timeline's plan, and each named schedule that fits (or `schedule` alone), by the measured costs.

    Raises PlanError where the timelines are not of one placement, ScheduleError where `schedule` is not for it.
    """
    placement = calibrated(*timelines)
    old = timelines[0].plan
    num_microbatches = old.num_microbatches
    measured = tuple(timeline.makespan_us for timeline in timelines)
    plan = replace(old, placement=placement)
    result = Calibration(simulate(old).makespan_us, measured, plan, ())
    if schedule is not None:
        return result.with_plan(schedule, NAMED[schedule](placement, num_microbatches))
    for name, other in named_plans(placement, num_microbatches, looking_at):
        try:
            result = result.with_plan(name, other)
        except PlanError:  # it would not fit in memory
            continue
    return result


def _command(plan: Plan) -> str:
    """By which the model is planned for the same ranks, memory and rows; … for what the plan does not say."""
    usage, limits = plan.usage, {*plan.placement.cluster.limit_bytes}
    limit = limits.pop() if len(limits) == 1 else None
    memory = "" if limit is None else f" --memory {limit}B"
    replicas = 1 if usage is None else usage.num_replicas
    batch = "…" if usage is None else usage.microbatch_rows * plan.num_microbatches * replicas
    return (
        f"rota autoplan --profile profile.json --ranks {plan.num_ranks * replicas}{memory} --batch {batch} "
        f"-o better.json"
    )


def _of_steps(count: int) -> str:
    return "one step" if count == 1 else f"median of {count} steps"
