"""Measured steps: their median, how far they are apart, and how much longer those of one plan are than another's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean, median, quantiles, stdev
from typing import NamedTuple

from rota.calibration.spread import num_left_out
from rota.core.timeline import Timeline

# Cores that other programs take away more than in the quietest start, from which on a start is left out.
_DISTURBED = 0.1
#: A plan whose steps are over this many times as long as the fastest is slower, however noisy the rounds were.
FAR = 1.25
# Student's t for a probability of 90%, by the number of rounds; from five on, order statistics reach it by themselves.
_STUDENT_T = {2: 6.314, 3: 2.920, 4: 2.353}


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Steps of one plan that were run on this machine: each one's time in µs, and the ops of some of them.

    `missing_cores` is how many cores other programs took away from them, on average. `num_starts` is how often the
    processes were started for them. `rounds_us` has the median step of each start, and None instead of those that other
    programs disturbed: two plans are compared by the rounds that both have.
    """

    steps_us: tuple[int, ...]
    timelines: tuple[Timeline, ...] = ()
    missing_cores: float = 0.0
    num_starts: int = 1
    rounds_us: tuple[int | None, ...] = ()

    @property
    def median_us(self) -> int:
        """The time of a step."""
        return round(median(self.steps_us))

    @property
    def spread(self) -> float:
        """The interquartile range of the steps, as a part of their median."""
        if len(self.steps_us) < 2:
            return 0.0
        first, middle, third = quantiles(self.steps_us, n=4, method="inclusive")
        return (third - first) / middle if middle else 0.0


def of_starts(starts: Sequence[StepTimes]) -> StepTimes:
    """The steps of one plan's starts, without starts that other programs disturbed more than the quietest."""
    most = min(start.missing_cores for start in starts) + _DISTURBED
    counted = [start for start in starts if start.missing_cores < most]
    return StepTimes(
        tuple(us for start in counted for us in start.steps_us),
        tuple(timeline for start in counted for timeline in start.timelines),
        mean(start.missing_cores for start in counted),
        len(starts),
        tuple(start.median_us if start in counted else None for start in starts),
    )


class Difference(NamedTuple):
    """How many `times` as long the steps of one plan are as another's, and the `spread` of that.

    The spread is how far from `times` the ratio may really be, as far as `num_rounds` rounds of both tell.
    """

    times: float
    spread: float
    num_rounds: int


def difference(steps: StepTimes, base: StepTimes) -> Difference:
    """Compare the steps of two plans round by round, so that what slows the machine for a while cancels.

    The median of the n rounds' ratios counts. Its spread covers the true ratio with a probability of 90%:

    - From five rounds on it is that of the order statistics between which the true median is, whatever the
      distribution: all n ratios are on one side of it with a probability of 2 / 2^n, 6% for n = 5.
    - The range of two to four ratios covers it in 50, 75 and 87% only. Therefore the ratios are taken as normally
      distributed, and it is Student's interval around their mean, t s / sqrt(n), if that is wider: for two ratios 6.3
      times half of their distance. The distance of median and mean is added.
    - Two rounds may also agree by chance, so the interquartile range of either plan's steps counts as well.
    - One round says nothing about how far rounds are apart: its spread is at least that of `FAR`.
    """
    ratios = sorted(ratios_of_rounds(steps, base))
    if len(ratios) < 2:
        return Difference(ratios[0], max(FAR - 1, steps.spread, base.spread), len(_common_rounds(steps, base)))
    times, outer = median(ratios), num_left_out(len(ratios))
    spread = max(times - ratios[outer], ratios[-1 - outer] - times)
    if len(ratios) in _STUDENT_T:
        around_mean = _STUDENT_T[len(ratios)] * stdev(ratios) / sqrt(len(ratios))
        spread = max(spread, around_mean + abs(mean(ratios) - times))
    if len(ratios) == 2:
        spread = max(spread, steps.spread, base.spread)
    return Difference(times, spread, len(ratios))


def ratios_of_rounds(steps: StepTimes, base: StepTimes) -> list[float]:
    """How many times as long one plan's steps are as another's in each round that both have.

    If they have none in common, the medians of all steps count as one round.
    """
    return [us / other_us for us, other_us in _common_rounds(steps, base)] or [steps.median_us / max(base.median_us, 1)]


def _common_rounds(steps: StepTimes, base: StepTimes) -> list[tuple[int, int]]:
    pairs = zip(steps.rounds_us, base.rounds_us, strict=False)  # a plan that is far off has fewer
    return [(us, other_us) for us, other_us in pairs if us and other_us]
