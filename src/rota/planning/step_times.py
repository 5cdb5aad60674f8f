"""Measured steps: their median, and how far they are apart."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median, quantiles

from rota.timeline import Timeline


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Steps of one plan that were run on this machine: each one's time in µs, and the ops of some of them."""

    steps_us: tuple[int, ...]
    timelines: tuple[Timeline, ...] = ()

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
