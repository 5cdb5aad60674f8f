"""Which storages are alive of those that came into being while one looked on, and the most that were at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch

from rota.runtime.torch_internals import StorageReference, address_of, tensors_anywhere


@final
class LiveStorages:
    """A storage counts once and whole, however many tensors view it: one of them keeps all of it alive."""

    def __init__(self) -> None:
        self._alive: dict[int, tuple[StorageReference, int]] = {}  # by the storage's address
        self._at_most_bytes = 0  # of what is alive, without looking at what has gone meanwhile
        #: The most that was alive since this was last set to 0.
        self.peak_bytes = 0

    def see(self, made: Any, given: Any = ()) -> None:
        """Count the storages of all tensors in `made`, but those in `given`: views, or written in place."""
        there = {*map(address_of, storages(given))}
        for storage in storages(made):
            if (address := address_of(storage)) not in there:
                _, before = self._alive.get(address, (None, 0))
                self._alive[address] = StorageReference(storage), storage.nbytes()
                self._at_most_bytes += storage.nbytes() - before
        if self._at_most_bytes > self.peak_bytes:
            self.peak_bytes = max(self.peak_bytes, self.num_bytes())

    def forget(self, tensor: torch.Tensor) -> None:
        """Count this one no longer."""
        _, num_bytes = self._alive.pop(address_of(tensor.untyped_storage()), (None, 0))
        self._at_most_bytes -= num_bytes

    def num_bytes(self) -> int:
        """Of all that are alive now."""
        self._at_most_bytes = sum(self.alive().values())
        return self._at_most_bytes

    def alive(self) -> dict[int, int]:
        """By address the bytes of all that are alive now."""
        expired = [at for at, (storage, _) in self._alive.items() if storage.is_expired]
        for at in expired:
            del self._alive[at]
        return {at: num_bytes for at, (_, num_bytes) in self._alive.items()}


def storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """Of all tensors in a value."""
    return (tensor.untyped_storage() for tensor in tensors_anywhere(value))
