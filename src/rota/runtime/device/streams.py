"""An accelerator of PyTorch as a device: CUDA, ROCm and XPU, by `torch.accelerator`.

    host      h0: begin ─▶ enqueues …  ─▶ end of the step ─▶ waits for e1: h1
    device             e0  ─▶ kernels … ─▶ e1

The device's clock shows e1 − e0. e0 is not before h0, and h1 comes within microseconds of e1: so e0 = h1 − (e1 − e0).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast, final

import torch
import torch.distributed as dist

from rota.core.programs.device_steps import COMPUTE
from rota.runtime.device.protocol import Number


@final
class StreamDevice:
    """See `rota.runtime.device.protocol.QueuedDevice`.

    It uses what all of PyTorch's accelerators have, so that one class serves all; CUDA's names are not used.
    """

    def __init__(self, device: torch.device) -> None:
        self.torch_device, self.is_queued = device, True
        self.backend: str = dist.get_default_backend_for_device(device)
        self._module: Any = torch.get_device_module(device)
        self._streams: dict[str, torch.Stream] = {}
        self._spare: deque[torch.Event] = deque()  # timed events that were read: making one costs more than reusing it
        self._begun = self._timed_event()
        self._begun_ns = 0  # `_begun` was not reached before; `_origin_ns` is when it was, once a step has ended
        self._origin_ns: int | None = None

    # --- streams ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A new step, on the caller's current stream."""
        torch.accelerator.set_device_index(self.torch_device)
        self._streams[COMPUTE] = torch.accelerator.current_stream(self.torch_device)
        if self._origin_ns is not None:
            self._spare.append(self._begun)
        self._begun_ns, self._origin_ns = time.monotonic_ns(), None
        self._begun = self.mark()

    def stream(self, name: str) -> torch.Stream:
        """The stream of this name; a new one the first time, whose messages and sums go before queued ops."""
        if name not in self._streams:
            self._streams[name] = torch.Stream(self.torch_device, priority=-1)
        return self._streams[name]

    def use(self, stream: torch.Stream) -> AbstractContextManager[object]:
        """A stream is a context manager of its own."""
        return stream

    def record(self, stream: torch.Stream) -> torch.Event:
        """An event without a time."""
        return stream.record_event()

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        """The host goes on."""
        stream.wait_event(event)

    def is_done(self, event: torch.Event) -> bool:
        """Asks the device."""
        return event.query()

    def keep_for(self, tensor: torch.Tensor, stream: torch.Stream) -> None:
        """PyTorch's allocator remembers the stream."""
        tensor.record_stream(stream)

    def synchronize(self) -> None:
        """Wait for all streams."""
        torch.accelerator.synchronize(self.torch_device)

    def reset_peak(self) -> None:
        """Of PyTorch's allocator, which has one count for all."""
        torch.accelerator.reset_peak_memory_stats(self.torch_device)

    def peak_bytes(self) -> int:
        """As PyTorch's allocator counts it."""
        return torch.accelerator.max_memory_allocated(self.torch_device)

    # --- time ---------------------------------------------------------------------------------------------------------

    def mark(self) -> torch.Event:
        """An event with a time."""
        return self.mark_on(torch.accelerator.current_stream(self.torch_device))

    def mark_on(self, stream: torch.Stream) -> torch.Event:
        """An event with a time."""
        event = self._spare.pop() if self._spare else self._timed_event()
        event.record(stream)
        return event

    def _timed_event(self) -> torch.Event:
        return torch.Event(self.torch_device, enable_timing=True)

    def times_ns(self, marks: Sequence[torch.Event]) -> list[int]:
        """Waits for the step to end, and maps the device's clock to the host's, see above."""
        if self._origin_ns is None:
            end = self.mark_on(self._streams[COMPUTE])
            end.synchronize()
            self._origin_ns = max(time.monotonic_ns() - _elapsed_ns(self._begun, end), self._begun_ns)
            self._spare.append(end)
        times_ns = [self._origin_ns + _elapsed_ns(self._begun, mark) for mark in marks]
        self._spare.extend(marks)
        return times_ns

    def reuse(self, marks: Sequence[torch.Event]) -> None:
        """A mark that was not reached yet is recorded again: streams that wait for it keep what they wait for."""
        self._spare.extend(marks)

    # --- numbers ------------------------------------------------------------------------------------------------------

    def number(self, tensor: torch.Tensor) -> Number:
        """A copy, as the stage may write into its tensor later, or keep a larger one alive by it."""
        return tensor.detach().reshape(()).to(torch.float64, copy=True)

    def numbers(self, numbers: Sequence[float]) -> torch.Tensor:
        """Copied from pinned memory, so that the host need not wait."""
        pinned = torch.tensor(numbers, dtype=torch.float64, device="cpu").pin_memory()
        return pinned.to(self.torch_device, non_blocking=True)

    def read(self, tensor: torch.Tensor) -> Callable[[], list[float]]:
        """Copies to pinned memory."""
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        pinned.copy_(tensor, non_blocking=True)
        copied = torch.accelerator.current_stream(self.torch_device).record_event()

        def numbers() -> list[float]:
            copied.synchronize()
            return cast("list[float]", pinned.tolist())

        return numbers

    # --- randomness ---------------------------------------------------------------------------------------------------

    def seed(self, seed: int) -> None:
        """Both generators live on the host, so no kernel is involved."""
        torch.default_generator.manual_seed(seed)
        self._module.manual_seed(seed)

    def random_state(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the CPU's generator and the device's."""
        return torch.get_rng_state(), self._module.get_rng_state(self.torch_device)

    def set_random_state(self, state: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Restore both."""
        torch.set_rng_state(state[0])
        self._module.set_rng_state(state[1], self.torch_device)


def _elapsed_ns(earlier: torch.Event, later: torch.Event) -> int:
    return round(earlier.elapsed_time(later) * 1e6)
