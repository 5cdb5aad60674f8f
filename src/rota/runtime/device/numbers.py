"""Numbers that kernels make, added up where they are, and read once.

place 0   w·x + w·x  ─┐
place 1   w·x         ├─▶ one row, on the device ──▶ all-reduced ──▶ read
place 2   3.0         ┘
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from typing import final

import torch

from rota.runtime.device.protocol import Device, Number


def number_in(value: torch.Tensor, device: Device) -> Number:
    """The number in a tensor with one element, as it is now. One on the CPU is known at once on every device."""
    return float(value.item()) if value.is_cpu else device.number(value)


def read_numbers(numbers: Sequence[Number], device: Device) -> list[float]:
    """All numbers. Waits for the device if it has some of them."""
    later = [number for number in numbers if isinstance(number, torch.Tensor)]
    read = iter(device.read(torch.stack(later))() if later else ())
    return [next(read) if isinstance(number, torch.Tensor) else number for number in numbers]


@final
class Sums:
    """Numbers added up by place. A place that gets nan leaves the others as they are. Does not wait for the device."""

    def __init__(self, num_places: int) -> None:
        #: The sums of the numbers that the host knows.
        self.known = [0.0] * num_places
        self._later: dict[int, list[tuple[float, torch.Tensor]]] = {}
        self._counts: dict[int, list[torch.Tensor]] = {}

    def add(self, place: int, number: Number, weight: Number = 1.0) -> None:
        """Add number × weight."""
        if isinstance(number, float):
            if isinstance(weight, float):
                self.known[place] += weight * number
                return
            number, weight = weight, number
        if not isinstance(weight, float):
            number, weight = number * weight, 1.0
        self._later.setdefault(place, []).append((weight, number))

    def add_if_no_count(self, place: int, number: Number) -> None:
        """Add 1 if the device has a number that is negative or not finite; the host refuses those that it knows."""
        if isinstance(number, torch.Tensor):
            self._counts.setdefault(place, []).append(number)

    def on(self, device: Device) -> torch.Tensor:
        """The sums as a tensor of float64."""
        if not self._later and not self._counts:
            return device.numbers(self.known)
        added = [product for of_place in self._later.values() for product in of_place]
        numbers = device.numbers([*self.known, *(weight for weight, _ in added)])
        row = numbers[: len(self.known)]
        if added:
            products = torch.stack([number for _, number in added]) * numbers[len(self.known) :]
            parts = torch.split(products, [len(of_place) for of_place in self._later.values()])
            for place, part in zip(self._later, parts, strict=True):
                row[place].add_(part.sum())
        for place, of_place in self._counts.items():
            counts = torch.stack(of_place)
            row[place].add_((counts != counts.clamp(0, sys.float_info.max)).sum())
        return row


def bits_of(number: float) -> int:
    """The bits of a number of 0 or more, as an int: in the numbers' order, with nan above them all."""
    bits: int = struct.unpack("<q", struct.pack("<d", abs(number)))[0]
    return bits


def number_of(bits: int) -> float:
    """The number that has these bits."""
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return number
