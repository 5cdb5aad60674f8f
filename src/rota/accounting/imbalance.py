"""Ranks of which one has much more work than the mean: what this costs, and what keeps cuts from balancing them."""

from __future__ import annotations

from statistics import mean
from typing import NamedTuple

from rota.calibration.best_plan import OVERLOADED
from rota.calibration.spread import Spread, copies, have_same_layers
from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.core.units import count_text, time_text


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
