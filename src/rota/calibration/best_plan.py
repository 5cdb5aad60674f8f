"""The best plan for the measured costs: the old orders, or another schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import mean, median
from typing import NamedTuple

from rota.calibration.measured_times import calibrated
from rota.calibration.spread import Spread, rank_loads
from rota.core.errors import PlanError
from rota.core.plan import Plan
from rota.core.simulation import check, simulate
from rota.core.text import angle_repr, count_text, fitted, table_lines, time_text
from rota.core.timeline import Timeline
from rota.schedules import NAMED
from rota.schedules.families import named_plans

MIN_GAIN = 0.01  # a smaller gain, relative to the makespan, does not justify another plan
OVERLOADED = 1.10  # a rank has too much work above this multiple of the mean
_MAX_ROWS = 6


class Candidate(NamedTuple):
    """Another plan for the same placement, and its simulated makespan."""

    name: str
    plan: Plan
    makespan_us: int


@dataclass(frozen=True)
class Calibration:
    """The old plan as planned, as measured and as predicted with the measured costs, and other plans with these costs.

    Attributes:
        planned_us: Makespan of the old plan, simulated with the old costs.
        measured_us: Makespan of each timeline.
        plan: The old orders with the measured costs.
        candidates: Other plans that fit, with the measured costs, fastest first.
        spread: How far the measured ops of each task are apart; None: unknown, and they count as exact.
    """

    planned_us: int
    measured_us: tuple[int, ...]
    plan: Plan
    candidates: tuple[Candidate, ...]
    spread: Spread | None = None

    def __str__(self) -> str:
        """One line."""
        times = f"measured {time_text(round(median(self.measured_us)))}, predicted {time_text(self.predicted_us)}"
        return f"Calibration: planned {time_text(self.planned_us)}, {times}"

    __repr__ = angle_repr

    @cached_property
    def predicted_us(self) -> int:
        """Makespan of the old orders with the measured costs."""
        return simulate(self.plan).makespan_us

    @property
    def gain(self) -> float:
        """How much faster the best candidate is, relative to `predicted_us`; 0 if none is faster."""
        best = min((candidate.makespan_us for candidate in self.candidates), default=self.predicted_us)
        return max(1 - best / self.predicted_us, 0.0) if self.predicted_us else 0.0

    @cached_property
    def is_faster(self) -> bool:
        """Whether the best candidate gains at least `MIN_GAIN`, and something with all times that `spread` allows."""
        if self.gain < MIN_GAIN:
            return False
        best = self.candidates[0].plan
        return self.spread is None or self.spread.holds(self.plan, lambda plan: replace(best, placement=plan.placement))

    @property
    def chosen(self) -> Plan:
        """The best candidate if it is certain to be faster, otherwise the old orders; with the measured costs."""
        return self.candidates[0].plan if self.is_faster else self.plan

    @property
    def unevenness(self) -> tuple[int, float]:
        """The rank with the most work per micro-batch, and its work as a multiple of the mean.

        Copies of a stage have the same layers, and count as equally long.
        """
        loads = rank_loads(self.plan.placement)
        most = max(range(len(loads)), key=loads.__getitem__)
        return most, loads[most] / mean(loads) if any(loads) else 1.0

    def with_plan(self, name: str, plan: Plan) -> Calibration:
        """This calibration with one more candidate, a plan for the new costs, which comes first of equally fast ones.

        Raises PlanError if the plan must not run.
        """
        check(plan)
        plan = replace(plan, usage=self.plan.usage)
        candidates = [Candidate(name, plan, simulate(plan).makespan_us), *self.candidates]
        return replace(self, candidates=tuple(sorted(candidates, key=lambda candidate: candidate.makespan_us)))

    def to_text(self, width: int | None = None) -> str:
        """The report that `rota calibrate` prints, in lines of at most `width` characters; None: of any length."""
        measured, num_steps = round(median(self.measured_us)), len(self.measured_us)
        rows = [
            ("planned, with the old costs", self.planned_us),
            (f"measured ({'one step' if num_steps == 1 else f'median of {num_steps} steps'})", measured),
            ("the same orders, with the new costs", self.predicted_us),
        ]
        rows += [(f"  {name}", makespan_us) for name, _, makespan_us in self.candidates[:_MAX_ROWS]]
        cells = [(what, f"{us:,}", f"{us / measured - 1:+.1%}" if measured else "") for what, us in rows]
        lines = table_lines(("makespan", "µs", "of measured"), cells, left={"makespan"}, width=width)
        return "\n".join([*lines, "", *(fitted(line, width) for line in self.verdict().split("\n"))])

    def verdict(self) -> str:
        """Whether to keep the plan, and whether to cut the model again."""
        if self.is_faster:
            best = self.candidates[0]
            text = f"Use {best.name}: {self.gain:.1%} faster than the same orders, with the new costs."
        elif self.gain >= MIN_GAIN:
            text = (
                f"Keep the plan's orders: {self.candidates[0].name} is {self.gain:.1%} faster with the median times, "
                f"but the measured ops differ too much to tell."
            )
        elif self.candidates:
            others = count_text(len(self.candidates), "other plan")
            text = f"Keep the plan's orders: none of {others} is {MIN_GAIN:.0%} faster."
        else:
            text = "Keep the plan's orders: no other schedule fits this placement."
        rank, share = self.unevenness
        is_certain = self.spread is None or self.spread.is_exact or self.spread.longest_part(rank_loads, rank)
        if share <= OVERLOADED or not is_certain:
            return text
        return (
            f"{text}\nRank {rank} has {share - 1:.0%} more work than the mean, which no order can fix: "
            f"`rota explain` says how to cut the model again."
        )


def calibrate(
    timelines: Sequence[Timeline], schedule: str | None = None, looking_at: Callable[[str], None] = lambda _: None
) -> Calibration:
    """Compare the timelines' plan with named schedules, all with measured costs.

    Args:
        timelines: Timelines of one placement; the plan is the first one's.
        schedule: The only named schedule to try. Default: every one that is defined here and fits in memory.
        looking_at: Called with the name of each schedule before it is tried.

    Returns:
        The makespans as planned, measured and predicted, and the other plans, fastest first.

    Raises:
        PlanError: The timelines are not of one placement, or `schedule` does not fit in memory.
        ScheduleError: `schedule` is not defined for this placement.
    """
    placement, old = calibrated(*timelines), timelines[0].plan
    measured_us = tuple(timeline.makespan_us for timeline in timelines)
    usage = None if old.usage is None else old.usage.measured_in(len(timelines))
    plan = replace(old, placement=placement, usage=usage)
    result = Calibration(simulate(old).makespan_us, measured_us, plan, (), Spread.of(timelines, placement))
    if schedule is not None:
        return result.with_plan(schedule, NAMED[schedule](placement, old.num_microbatches))
    for name, other in named_plans(placement, old.num_microbatches, looking_at):
        with suppress(PlanError):  # it would not fit in memory
            result = result.with_plan(name, other)
    return result
