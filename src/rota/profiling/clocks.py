"""Measures the parts of a run: on a CPU by the wall clock, on a queued device by its own events, with full queues.

    host     spin │ F B W │ F B W │ F B W          enqueues some runs while the device is still in the spin
    device   ██ spin ███████████████│F│B │W│F│B │W│F│B │W          so it never waits for the host between kernels
                                      events between the parts, read after the last

A part counts if the device had not begun it when the host had enqueued all of it. If it had, fewer runs are measured
behind a longer spin.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median, quantiles
from typing import Any, NamedTuple, Protocol, TypeAlias, final

import torch

from rota.core.errors import PipelineError
from rota.core.text import time_text
from rota.runtime.device.protocol import Device, QueuedDevice, is_queued
from rota.torch_internals import sleep_kernel

_MOST_ENQUEUED_NS = 3_000_000  # host time of runs enqueued at once: a launch queue of 1024 kernels, a few µs each
_LEAST_NS = 5_000_000  # of a measurement: no process interrupts a device
_NUM_ALONE = 3
_HEAD_START = 1.5  # of the host's time for the runs
_TRIES = 4  # bursts, for each one that is needed
_LEAST_HEAD_START_US, _LONGEST_HEAD_START_US = 50.0, 100_000.0
_LEAST_CALIBRATION_US, _MOST_COUNT = 5_000.0, 2**40  # long compared with what starts a kernel
_CHAIN_ELEMENTS = 2**18  # of a kernel that spins where the device has none that counts cycles
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
    remarks = []
    for kind, us, host_us, is_starved in zip(kinds, laps.us, laps.host_us, laps.starved, strict=False):
        if host_us > max(us, _MARK_US):
            waits = "the device waits for it" if is_starved else f"{time_text(round(us))} to run"
            remarks.append(f"{kind} takes the host {time_text(round(host_us))} to enqueue, {waits}")
    return "; ".join(remarks)


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

    def timed(self, run: Run, repeats: int, least_ns: int, together: bool) -> Laps:
        """See `Clock.timed`."""
        _host_laps_us(run)
        rounds = 1 + int(least_ns // (1000 * sum(_host_laps_us(run)) + 1))
        rows: list[list[float]] = []
        for i in range(repeats * rounds):
            laps = _host_laps_us(run)
            if together and i % rounds:
                rows[-1] = [a + b for a, b in zip(rows[-1], laps, strict=True)]
            else:
                rows.append(laps)
        return medians(rows, rounds if together else 1)


def _host_laps_us(run: Run) -> list[float]:
    marks: list[int] = []
    run(lambda: marks.append(time.perf_counter_ns()))
    return [(end - start) / 1000 for start, end in pairwise(marks)]


def medians(rows: Sequence[Sequence[float]], num_runs: int = 1) -> Laps:
    """Of the times of each part, in µs; each row has those of `num_runs` runs, added up."""
    times = [*map(sum, rows)]
    first, middle, third = quantiles(times, n=4, method="inclusive") if len(times) > 1 else (0.0, 0.0, 0.0)
    spread = round((third - first) / middle, 4) if middle else 0.0
    return Laps([median(column) / num_runs for column in zip(*rows, strict=True)], spread)


# --- queued devices ---------------------------------------------------------------------------------------------------


class _Burst(NamedTuple):
    """Some runs enqueued at once: for each run the time of each part, and whether its queue was full."""

    us: list[list[float]]
    host_us: list[list[float]]
    is_full: list[list[bool]]


@final
class Spinner:
    """Keeps `device` busy: by a kernel that counts its cycles, where PyTorch has one, else by a chain of kernels.

    Making it takes some ten milliseconds, in which the device measures what that takes. Raises PipelineError if its
    events tell no times.
    """

    def __init__(self, device: QueuedDevice, work: Callable[[int], None] | None = None) -> None:
        self._device, self._work = device, work or sleep_kernel(device.torch_device) or _chain(device.torch_device)
        count = 1
        while (us := min(self._measured_us(count) for _ in range(2))) < _LEAST_CALIBRATION_US:
            count *= 2
            if count > _MOST_COUNT:
                raise PipelineError(
                    f"a kernel that should keep {device.torch_device} busy ends at once, whatever it is asked for; the "
                    f"device's events tell no times: update its driver"
                )
        self._per_count_us = us / count

    def spin(self, duration_us: float) -> None:
        """Enqueue kernels on the current stream that take about `duration_us`; none if that is not above 0."""
        if (count := round(duration_us / self._per_count_us)) > 0:
            self._work(count)

    def _measured_us(self, count: int) -> float:
        device = self._device
        device.begin()
        self._work(max(count // 4, 1))  # the device is busy when the first mark comes, so starting is no part of it
        marks = [device.mark()]
        self._work(count)
        marks.append(device.mark())
        start_ns, end_ns = device.times_ns(marks)
        return (end_ns - start_ns) / 1000


def _chain(where: torch.device) -> Callable[[int], None]:
    """Equal kernels that compute much and move few bytes."""
    numbers = torch.full((_CHAIN_ELEMENTS,), 3.5, device=where)
    out = torch.empty_like(numbers)

    def work(count: int) -> None:
        for _ in range(count):
            torch.lgamma(numbers, out=out)

    return work


@final
class DeviceClock:
    """See `Clock`. It measures the kernels of the current stream; the host waits only behind the last of a burst."""

    def __init__(self, device: QueuedDevice) -> None:
        self._device, self._spinner = device, Spinner(device)

    def timed(self, run: Run, repeats: int, least_ns: int, together: bool) -> Laps:  # noqa: ARG002 - see _LEAST_NS
        """See `Clock.timed`."""
        run(lambda: None)
        alone = [self._burst(run, 1, 0.0) for _ in range(_NUM_ALONE)]  # on an empty queue, which never blocks the host
        host_us = [min(column) for column in zip(*(burst.host_us[0] for burst in alone), strict=True)]
        run_ns = 1000 * min(sum(burst.us[0]) for burst in alone)
        num_runs = repeats * (1 + int(min(least_ns, _LEAST_NS) // (run_ns + 1)))
        per_burst = max(min(int(_MOST_ENQUEUED_NS // (1000 * sum(host_us) + 1)), num_runs), 1)
        head_start_us = max(_HEAD_START * per_burst * sum(host_us), _LEAST_HEAD_START_US)
        proven: list[list[float]] = []  # runs of which the queue was full in every part
        parts: list[list[float]] = [[] for _ in host_us]  # times of each part behind a full queue
        for _ in range(_TRIES * -(-num_runs // per_burst)):
            burst = self._burst(run, per_burst, head_start_us)
            for us, full in zip(burst.us, burst.is_full, strict=True):
                proven += [us] if all(full) else []
                for part, of_part, is_full in zip(parts, us, full, strict=True):
                    part += [of_part] if is_full else []
            if len(proven) >= num_runs:
                break
            if not all(map(all, burst.is_full)):
                per_burst, head_start_us = max(per_burst // 2, 1), min(2 * head_start_us, _LONGEST_HEAD_START_US)
        return _laps(proven, parts, burst.us, host_us)

    def _burst(self, run: Run, num_runs: int, head_start_us: float) -> _Burst:
        device = self._device
        marks: list[Any] = []
        times_ns: list[int] = []
        is_full: list[bool] = []

        def mark() -> None:
            if marks:
                is_full.append(not device.is_done(marks[-1]))
            times_ns.append(time.perf_counter_ns())
            marks.append(device.mark())

        device.begin()
        self._spinner.spin(head_start_us)
        for _ in range(num_runs):
            run(mark)
        per_run = len(marks) // num_runs
        full = [is_full[i : i + per_run - 1] for i in range(0, len(marks), per_run)]  # not between two runs
        return _Burst(_laps_us(device.times_ns(marks), per_run), _laps_us(times_ns, per_run), full)


def _laps(proven: list[list[float]], parts: list[list[float]], others: list[list[float]], host_us: list[float]) -> Laps:
    """The times of parts behind full queues; `others`: for parts that never were."""
    spread = medians(proven or others).spread
    us = [median(part or [run[i] for run in others]) for i, part in enumerate(parts)]
    # Where the launch queue was too short for the proof, a host that is faster than the device kept ahead anyway.
    starved = [not part and of_host > of_part for part, of_host, of_part in zip(parts, host_us, us, strict=True)]
    return Laps(us, spread, host_us, starved)


def _laps_us(times_ns: list[int], per_run: int) -> list[list[float]]:
    runs = (times_ns[i : i + per_run] for i in range(0, len(times_ns), per_run))
    return [[(end - start) / 1000 for start, end in pairwise(run)] for run in runs]


@final
class Clocks:
    """The clock of each device, made when it is first asked for."""

    def __init__(self) -> None:
        self._clocks: dict[torch.device, Clock] = {}

    def on(self, device: Device) -> Clock:
        """The clock that fits the device."""
        where = device.torch_device
        if where not in self._clocks:
            self._clocks[where] = DeviceClock(device) if is_queued(device) else WallClock()
        return self._clocks[where]
