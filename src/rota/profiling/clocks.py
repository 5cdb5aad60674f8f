"""Measures the parts of a run on a CPU: by the wall clock. `device_clock.py` does it on queued devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median, quantiles
from typing import NamedTuple, Protocol, TypeAlias, final

from rota.units import time_text

_MARK_US = 30.0  # a part that takes the host no longer than this may be empty: the marks around it take as long

#: Runs some parts; it calls its argument before the first part, between parts, and after the last.
Run: TypeAlias = Callable[[Callable[[], None]], None]


class Laps(NamedTuple):
    """The median time of each part in µs, and the interquartile range of whole runs as a fraction of their median.

    On a queued device, `host_us` is what the host needs to enqueue each part. `starved` says of which parts it could
    not keep ahead: the device waited, so their times are rather those of the host.
    """

    us: list[float]
    spread: float
    host_us: Sequence[float] = ()
    starved: Sequence[bool] = ()


def launch_text(kinds: Sequence[str], laps: Laps) -> str:
    """Which parts the host enqueues more slowly than the device runs them, by `kinds`, in words; "" if none."""
    told = []
    for kind, us, host_us, is_starved in zip(kinds, laps.us, laps.host_us, laps.starved, strict=False):
        if host_us > max(us, _MARK_US):
            waits = "the device waits for it" if is_starved else f"{time_text(round(us))} to run"
            told.append(f"{kind} takes the host {time_text(round(host_us))} to enqueue, {waits}")
    return "; ".join(told)


class Clock(Protocol):
    """Measures the parts of a run."""

    def timed(self, run: Run, repeats: int, least_ns: int, together: bool) -> Laps:
        """Measure `repeats` times after a warm-up, each time as many runs as last `least_ns`.

        `together`: the runs of a measurement are added up, including interruptions by other processes on the core.
        Otherwise each run counts alone, so that the median leaves out interruptions.
        """


@final
class WallClock:
    """A clock for work that is done when its call returns."""

    def __init__(self) -> None:
        self._marks: list[int] = []

    def timed(self, run: Run, repeats: int, least_ns: int, together: bool) -> Laps:
        """See `Clock.timed`."""
        self._laps_ns(run)
        rounds = 1 + int(least_ns // (sum(self._laps_ns(run)) + 1))
        rows: list[list[float]] = []
        for i in range(repeats * rounds):
            laps = [ns / 1000 for ns in self._laps_ns(run)]
            if together and i % rounds:
                rows[-1] = [a + b for a, b in zip(rows[-1], laps, strict=True)]
            else:
                rows.append(laps)
        return medians(rows, rounds if together else 1)

    def _laps_ns(self, run: Run) -> list[int]:
        marks: list[int] = []
        run(lambda: marks.append(time.perf_counter_ns()))
        return [end - start for start, end in pairwise(marks)]


def medians(rows: Sequence[Sequence[float]], num_runs: int = 1) -> Laps:
    """Of the times of each part, in µs; each row has those of `num_runs` runs, added up."""
    return Laps([median(column) / num_runs for column in zip(*rows, strict=True)], _spread([*map(sum, rows)]))


def _spread(times: list[float]) -> float:
    if len(times) < 2:
        return 0.0
    first, middle, third = quantiles(times, n=4, method="inclusive")
    return round((third - first) / middle, 4) if middle else 0.0
