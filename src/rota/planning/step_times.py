"""Measured steps: their median, and how far they are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median, quantiles

from rota.timeline import Timeline

_DISTURBED = (
    0.1  # cores that other programs take away more than in the quietest start, from which on a start is left out
)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Steps of one plan that were run on this machine: each one's time in µs, and the ops of some of them.

    `missing_cores` is how many cores other programs took away from them, on average; `num_starts` is how often the
    processes were started for them.
    """

    steps_us: tuple[int, ...]
    timelines: tuple[Timeline, ...] = ()
    missing_cores: float = 0.0
    num_starts: int = 1

    @property
    def median_us(self) -> int:
        """The time of a step."""
        return round(median(self.steps_us))

    @property
    def spread(self) -> float:
        """The middle half of the steps, as a part of their median."""
        if len(self.steps_us) < 2:
            return 0.0
        first, middle, third = quantiles(self.steps_us, n=4, method="inclusive")
        return (third - first) / middle if middle else 0.0


def of_starts(starts: Sequence[StepTimes]) -> StepTimes:
    """The steps of several starts of one plan, without those that other programs disturbed more than the quietest."""
    most = min(start.missing_cores for start in starts) + _DISTURBED
    counted = [start for start in starts if start.missing_cores < most]
    return StepTimes(
        tuple(us for start in counted for us in start.steps_us),
        tuple(timeline for start in counted for timeline in start.timelines),
        mean(start.missing_cores for start in counted),
        len(starts),
    )
