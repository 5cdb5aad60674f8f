"""Measures the parts of a run: by the wall clock, or by events on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median, quantiles
from typing import NamedTuple, Protocol, TypeAlias, final

import torch

#: Runs some parts; it calls its argument before the first part, between parts, and after the last.
Run: TypeAlias = Callable[[Callable[[], None]], None]


class Clock(Protocol):
    """Measures the time between marks."""

    def mark(self) -> None:
        """End one part here and begin the next."""

    def laps_ns(self) -> list[float]:
        """The times between the marks so far, in ns; clears the marks."""


@final
class WallClock:
    """A clock for work that is done when its call returns."""

    def __init__(self) -> None:
        self._marks: list[int] = []

    def mark(self) -> None:
        """End one part here and begin the next."""
        self._marks.append(time.perf_counter_ns())

    def laps_ns(self) -> list[float]:
        """The times between the marks so far, in ns; clears the marks."""
        laps = [float(end - start) for start, end in pairwise(self._marks)]
        self._marks.clear()
        return laps


@final
class CudaClock:
    """A clock for kernels on the current CUDA stream: time on the device, whatever the process does meanwhile."""

    def __init__(self) -> None:
        self._marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """End one part here and begin the next, by an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def laps_ns(self) -> list[float]:
        """Wait for the device; return its times between the marks so far, in ns, and clear the marks."""
        torch.cuda.synchronize()
        laps = [start.elapsed_time(end) * 1e6 for start, end in pairwise(self._marks)]  # elapsed_time is in ms
        self._marks.clear()
        return laps


class Laps(NamedTuple):
    """The median time of each part in µs, and the interquartile range of whole runs as a fraction of their median."""

    us: list[float]
    spread: float


def timed(run: Run, clock: Clock, repeats: int, least_ns: int, together: bool) -> Laps:
    """Measure `repeats` times after a warm-up, each time as many runs as last `least_ns`.

    `together`: the runs of a measurement are added up, including interruptions by other processes on the core.
    Otherwise each run counts alone, so that the median leaves out interruptions.
    """
    run(clock.mark)
    clock.laps_ns()
    run(clock.mark)
    rounds = 1 + int(least_ns // (sum(clock.laps_ns()) + 1))
    rows: list[list[float]] = []
    for i in range(repeats * rounds):
        run(clock.mark)
        laps = [ns / 1000 for ns in clock.laps_ns()]
        if together and i % rounds:
            rows[-1] = [a + b for a, b in zip(rows[-1], laps, strict=True)]
        else:
            rows.append(laps)
    num_runs = rounds if together else 1
    return Laps([median(column) / num_runs for column in zip(*rows, strict=True)], _spread([*map(sum, rows)]))


def _spread(times: list[float]) -> float:
    if len(times) < 2:
        return 0.0
    first, middle, third = quantiles(times, n=4, method="inclusive")
    return round((third - first) / middle, 4) if middle else 0.0
