"""Keeps a queued device busy for a given time: kernels that compute nothing, calibrated by the device's own events."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import TypeAlias, final

import torch

from rota.errors import PipelineError
from rota.runtime.device.protocol import QueuedDevice
from rota.torch_internals import sleep_kernel

#: Enqueues work on the current stream; its time grows with the number.
Work: TypeAlias = Callable[[int], None]

_SHORTEST_US = 5_000.0  # of a calibration: long compared with what starts a kernel
_MOST = 2**40
_TRIES = 6
_NEAR = 0.03  # a prediction that far off is good enough
_LEAST_KERNEL_US = 20.0  # of `_Chain`: several times what the host needs to enqueue one
_MOST_ELEMENTS = 2**22


@final
class Spinner:
    """Keeps `device` busy. Making it takes some ten milliseconds, in which the device measures what `work` takes.

    `work` is by default one kernel that counts the device's cycles, where PyTorch has it, else a chain of kernels.

    Raises:
        PipelineError: the time of `work` does not grow steadily with its number.
    """

    def __init__(self, device: QueuedDevice, work: Work | None = None) -> None:
        self._device = device
        self._work = work or sleep_kernel(device.torch_device) or _Chain(device)
        self._fixed_us, self._per_count_us = self._calibrated()

    @property
    def resolution_us(self) -> float:
        """The step in which times can be chosen."""
        return self._per_count_us

    def spin(self, duration_us: float) -> None:
        """Enqueue kernels on the current stream that take about `duration_us`; none if that is not above 0."""
        count = round((duration_us - self._fixed_us) / self._per_count_us) if duration_us > 0 else 0
        if count > 0:
            self._work(count)

    def _calibrated(self) -> tuple[float, float]:
        """What the work takes at least, and for each further count, in µs."""
        count = 1
        while min(self._measured_us(count) for _ in range(2)) < _SHORTEST_US:
            count *= 2
            if count > _MOST:
                raise PipelineError(
                    f"a kernel that should keep {self._device.torch_device} busy ends at once, whatever it is asked "
                    f"for; the device's events tell no times: update its driver"
                )
        quarter, half, whole = max(count // 4, 1), max(count // 2, 1), max(count, 4)
        tries = []
        for _ in range(_TRIES):
            quarter_us, half_us, whole_us = (
                median(self._measured_us(of) for _ in range(3)) for of in (quarter, half, whole)
            )
            per_count_us = (whole_us - quarter_us) / (whole - quarter)
            fixed_us = max(whole_us - per_count_us * whole, 0.0)
            off = abs(fixed_us + per_count_us * half - half_us) / half_us
            if per_count_us > 0 and off < _NEAR:
                return fixed_us, per_count_us
            tries.append(f"{off:.0%}")
        raise PipelineError(
            f"times on {self._device.torch_device} vary too much to calibrate kernels: predictions were off by "
            f"{', '.join(tries)}; end what else uses the device, or fix its clock rate"
        )

    def _measured_us(self, count: int) -> float:
        device = self._device
        device.begin()
        self._work(max(count // 4, 1))  # the device is busy when the first mark comes, so starting is no part of it
        marks = [device.mark()]
        self._work(count)
        marks.append(device.mark())
        start_ns, end_ns = device.times_ns(marks)
        return (end_ns - start_ns) / 1000


@final
class _Chain:
    """`count` equal kernels, each long enough for the host to keep ahead: they compute much and move few bytes."""

    def __init__(self, device: QueuedDevice) -> None:
        self._device = device
        num_elements = 2**14
        self._make(num_elements)
        while self._kernel_us() < _LEAST_KERNEL_US and num_elements < _MOST_ELEMENTS:
            num_elements *= 2
            self._make(num_elements)

    def _make(self, num_elements: int) -> None:
        self._from = torch.full((num_elements,), 3.5, device=self._device.torch_device)
        self._to = torch.empty_like(self._from)

    def __call__(self, count: int) -> None:
        for _ in range(count):
            torch.lgamma(self._from, out=self._to)

    def _kernel_us(self) -> float:
        device, many = self._device, 32
        device.begin()
        self(many)
        marks = [device.mark()]
        self(many)
        marks.append(device.mark())
        start_ns, end_ns = device.times_ns(marks)
        return (end_ns - start_ns) / 1000 / many
