"""Ranks of which one has much more work than the mean: what this costs, and what keeps cuts from balancing them."""

from __future__ import annotations

from statistics import mean
from typing import NamedTuple

from rota.calibration.best_plan import OVERLOADED
from rota.calibration.spread import FEWEST, Spread, copies, have_same_layers
from rota.placement import Placement
from rota.plan import Plan
from rota.units import count_text, time_text


class Imbalance(NamedTuple):
    """The ranks with the most and the least work.

    Attributes:
        busiest: The rank with the most work.
        idlest: The rank with the least.
        times_mean: The busiest rank's work as a multiple of the mean rank's, and the idlest rank's.
        work_us: The busiest rank's work in a step: the step takes at least as long.
        even_us: The mean rank's: a step with the same work, the same for all ranks, takes at least as long.
        why: What keeps cuts from balancing the ranks, and what to try, in words.
    """

    busiest: int
    idlest: int
    times_mean: tuple[float, float]
    work_us: int
    even_us: int
    why: str

    def to_text(self) -> str:
        """The paragraph of a report."""
        more, less = (round(100 * abs(times - 1)) for times in self.times_mean)
        return (
            f"The work of the ranks is uneven: rank {self.busiest} has {more}% more than the mean, rank {self.idlest} "
            f"{less}% less. A step takes at least as long as the work of rank {self.busiest}, "
            f"{time_text(self.work_us)}; with as much work in all, but the same on every rank, it could take "
            f"{time_text(self.even_us)} at best. {self.why}"
        )


class WithinSpread(NamedTuple):
    """A rank that has more work than the mean with the median times of its ops, but not for certain.

    Attributes:
        busiest: The rank with the most work.
        times_mean: Its work as a multiple of the mean rank's.
        least_times_mean: The least multiple that the spread of the measured ops leaves possible, at most 1.
        most_times_mean: The greatest.
        has_too_few: Whether so few ops of a task were measured that their spread says nothing.
    """

    busiest: int
    times_mean: float
    least_times_mean: float
    most_times_mean: float
    has_too_few: bool

    @property
    def is_even(self) -> bool:
        """Whether the rank has too little more than the mean to count as uneven, whatever times are possible."""
        return not self.has_too_few and self.most_times_mean <= OVERLOADED

    def to_text(self) -> str:
        """The line of a report."""
        more = f"Rank {self.busiest} has {self.times_mean - 1:.1%} more work than the mean"
        if self.has_too_few:
            return f"{more}. This may be chance: of some task, fewer than {FEWEST} ops were measured."
        possible = f"{self.least_times_mean - 1:+.1%} to {self.most_times_mean - 1:+.1%}"
        verdict = "the ranks count as even" if self.is_even else "too uncertain to tell whether the ranks are even"
        return f"{more}, within the spread of the measured ops ({possible}): {verdict}."


def within_spread(plan: Plan, spread: Spread) -> WithinSpread | None:
    """The busiest rank, if `spread` leaves possible that it has no more work than the mean of the others.

    None if the times are exact, there is one rank, or all ranks hold the same layers.
    """
    if spread.is_exact or plan.placement.num_ranks == 1 or have_same_layers(plan.placement):
        return None
    work_us = rank_work_us(plan)
    busiest = work_us.index(max(work_us))
    if spread.longest_part(_loads, busiest):
        return None
    times_mean = work_us[busiest] / (mean(work_us) or 1)
    return WithinSpread(busiest, times_mean, *spread.shares(_loads, busiest), spread.has_too_few)


def imbalance(plan: Plan, spread: Spread) -> Imbalance | None:
    """How uneven the ranks' work is; None if it is even, or may be so with other times that `spread` leaves possible.

    None too where all ranks hold the same layers: they do the same work, whatever the cuts.
    """
    work_us = rank_work_us(plan)
    average_us = mean(work_us)
    busiest, idlest = work_us.index(max(work_us)), work_us.index(min(work_us))
    if work_us[busiest] <= OVERLOADED * average_us or have_same_layers(plan.placement):
        return None
    if not spread.is_exact and not spread.longest_part(_loads, busiest):
        return None
    times_mean = work_us[busiest] / average_us, work_us[idlest] / average_us
    return Imbalance(busiest, idlest, times_mean, work_us[busiest], int(average_us), _why(plan, busiest))


def rank_work_us(plan: Plan) -> list[int]:
    """The work of each rank in a step in µs."""
    return [sum(map(plan.duration_us, order)) for order in plan.orders]


def _loads(placement: Placement) -> list[float]:
    """The work of each rank per micro-batch in µs."""
    work_us = [0.0] * placement.num_ranks
    for task in placement.average.tasks:
        for rank in task.ranks:
            work_us[rank] += task.duration_us
    return work_us


def _why(plan: Plan, busiest: int) -> str:
    usage, placement = plan.usage, plan.placement
    if usage is None or not usage.num_layers:
        return (
            "The plan does not say how many layers its stages have. Stages of several layers can be cut elsewhere, as "
            "`rota autoplan MODEL.py` does."
        )
    period, stages = copies(placement), placement.stages
    mine = [stage for stage in stages if stage in placement.stages_on(busiest)]
    layers = {usage.num_layers[stages.index(stage) % period % len(usage.num_layers)] for stage in mine}
    fewer = "fewer stages per rank, of more layers each" if len(mine) > 1 else "fewer ranks per pipeline"
    remedy = f"Try {fewer}, or more places to cut, inside the blocks (`--cuts`, or rota.CutPoint in the model)."
    if layers != {1}:
        return remedy
    there = count_text(sum(usage.num_layers), "layer")
    one = (
        f"Stages {', '.join(map(str, mine[:-1]))} and {mine[-1]} of rank {busiest} have"
        if len(mine) > 1
        else f"Stage {mine[0]} of rank {busiest} has"
    )
    return (
        f"{one} one layer{' each' if len(mine) > 1 else ''} ({there} in {len(usage.num_layers)} stages), so other "
        f"cuts can only exchange layers, not divide them. {remedy}"
    )
