"""The CPU as a device: each op is over when its call returns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import final

import torch


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
        return torch.tensor(numbers, dtype=torch.float64, device="cpu")

    def read(self, tensor: torch.Tensor) -> Callable[[], list[float]]:
        """Its numbers are there already."""
        return tensor.tolist
