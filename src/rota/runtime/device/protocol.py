"""What the runtime asks of the hardware under a rank's stages.

    Device             seeds, reads numbers, says when
      HostDevice       the CPU: an op is over when its call returns
      QueuedDevice     the host enqueues kernels, which run later: streams and events order them
        StreamDevice   CUDA, ROCm and XPU, by torch.accelerator

Nothing else in the runtime knows which of them it has, except that stages on a `QueuedDevice` run the steps of
`rota.core.programs.device_steps`.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias, TypeGuard, final

import torch

#: A number that a kernel makes: known at once, or a tensor with one element to read after the step.
Number: TypeAlias = float | torch.Tensor
#: A moment in the order of ops: ns of the monotonic clock, or an event.
Mark: TypeAlias = Any


class Device(Protocol):
    """One rank's device. Only `times_ns` and what `read` returns may wait for kernels."""

    #: Where the tensors of its stages are.
    torch_device: torch.device
    #: The backend of process groups that take its tensors.
    backend: str
    #: Whether kernels run after the host has enqueued them.
    is_queued: bool

    def begin(self) -> None:
        """Before the first op of a step."""

    def mark(self) -> Mark:
        """This moment, behind all kernels that the current stream has got."""

    def times_ns(self, marks: Sequence[Mark]) -> list[int]:
        """When the marks of the last step were reached, in ns of the host's monotonic clock. Marks are read once."""

    def number(self, tensor: torch.Tensor) -> Number:
        """The number in a tensor with one element, as it is now; nan if the tensor is on meta."""

    def numbers(self, numbers: Sequence[float]) -> torch.Tensor:
        """A tensor of float64 on the device. Does not wait."""

    def read(self, tensor: torch.Tensor) -> Callable[[], list[float]]:
        """Start to copy a tensor with one dim to the host; the result waits for the copy, and returns the numbers."""

    def seed(self, seed: int) -> object:
        """Seed all generators from which ops draw: PyTorch's on the CPU, and the device's own."""

    def random_state(self) -> Any:
        """The states of these generators."""

    def set_random_state(self, state: Any) -> None:
        """Restore what `random_state` returned."""


class QueuedDevice(Device, Protocol):
    """A device whose kernels run in streams, after the host has enqueued them. Streams and events are its own."""

    def stream(self, name: str) -> Any:
        """The stream of this name; `rota.core.programs.device_steps.COMPUTE` is the one that was current at `begin`."""

    def use(self, stream: Any) -> AbstractContextManager[object]:
        """Enqueue the kernels inside the context on `stream`."""

    def record(self, stream: Any) -> Any:
        """An event behind all kernels that `stream` has got."""

    def mark_on(self, stream: Any) -> Mark:
        """This moment, behind all kernels that `stream` has got. A mark is an event too."""

    def reuse(self, marks: Sequence[Mark]) -> None:
        """Nobody will read these marks."""

    def wait(self, stream: Any, event: Any) -> None:
        """Let the kernels that `stream` gets from now on wait for the event."""

    def is_done(self, event: Any) -> bool:
        """Whether the device has reached the event. Does not wait."""

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        """When the tensor is freed, reuse its memory only after all kernels that `stream` has got by then."""

    def synchronize(self) -> None:
        """Wait for all kernels."""

    def reset_peak(self) -> None:
        """Count `peak_bytes` from what is allocated now. Does not wait. The caller's own count begins again, too."""

    def peak_bytes(self) -> int:
        """The most bytes allocated since `reset_peak`. Does not wait."""


def is_queued(device: Device) -> TypeGuard[QueuedDevice]:
    """Whether it is a `QueuedDevice`."""
    return device.is_queued


@final
class HostDevice:
    """See `rota.runtime.device.protocol.Device`. Marks are ns of the monotonic clock."""

    def __init__(self) -> None:
        self.torch_device, self.backend = torch.device("cpu"), "gloo"
        self.is_queued = False
        self.mark = time.monotonic_ns
        self.seed = torch.default_generator.manual_seed
        self.random_state, self.set_random_state = torch.get_rng_state, torch.set_rng_state

    def begin(self) -> None:
        """Nothing: there is no queue."""

    def times_ns(self, marks: Sequence[int]) -> list[int]:
        """The marks themselves."""
        return [*marks]

    def number(self, tensor: torch.Tensor) -> float:
        """The number itself."""
        return math.nan if tensor.is_meta else float(tensor.item())

    def numbers(self, numbers: Sequence[float]) -> torch.Tensor:
        """A tensor of float64."""
        return torch.frombuffer(array("d", numbers), dtype=torch.float64)  # a tensor of a list takes five times as long

    def read(self, tensor: torch.Tensor) -> Callable[[], list[float]]:
        """Its numbers are there already."""
        return tensor.tolist
