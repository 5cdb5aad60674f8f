"""Counts the bytes of tensors that are alive: those that operations make, and, as a debug mode, op by op."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, final

import torch
from torch import nn

from rota.core.tasks import Op
from rota.torch_internals import StorageReference, TorchDispatchMode, address_of, tensors_anywhere


@final
class LiveStorages:
    """Counts storages, each once and whole however many tensors view it: one view keeps all of it alive."""

    def __init__(self) -> None:
        self._alive: dict[int, tuple[StorageReference, int]] = {}  # by the storage's address
        self._upper_bound_bytes = 0  # counts storages that were freed since the last look, too
        #: The most that was alive since this was last set to 0.
        self.peak_bytes = 0

    def see(self, results: Any, arguments: Any = ()) -> None:
        """Count the storages of all tensors in `results`, except those of `arguments`: views, or written in place."""
        known_addresses = {*map(address_of, storages(arguments))}
        for storage in storages(results):
            if (address := address_of(storage)) not in known_addresses:
                _, before = self._alive.get(address, (None, 0))
                self._alive[address] = StorageReference(storage), storage.nbytes()
                self._upper_bound_bytes += storage.nbytes() - before
        if self._upper_bound_bytes > self.peak_bytes:
            self.peak_bytes = max(self.peak_bytes, self.num_bytes())

    def forget(self, tensor: torch.Tensor) -> None:
        """Stop counting a tensor's storage."""
        _, num_bytes = self._alive.pop(address_of(tensor.untyped_storage()), (None, 0))
        self._upper_bound_bytes -= num_bytes

    def num_bytes(self) -> int:
        """The bytes of all counted storages that are alive now."""
        self._upper_bound_bytes = sum(self.alive().values())
        return self._upper_bound_bytes

    def alive(self) -> dict[int, int]:
        """The bytes of each counted storage that is alive now, by address."""
        self._alive = {at: counted for at, counted in self._alive.items() if not counted[0].is_expired}
        return {at: num_bytes for at, (_, num_bytes) in self._alive.items()}


def storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of all tensors in a value."""
    return (tensor.untyped_storage() for tensor in tensors_anywhere(value))


class OpMemory(NamedTuple):
    """Bytes alive of tensors made since the watch began: the most while `op` ran, and after it."""

    op: Op
    peak_bytes: int
    after_bytes: int


@final
class MemoryWatch(TorchDispatchMode):
    """Counts every tensor that is made while it is entered: activations, boundary buffers, gradients in transit.

    Not counted: tensors from before (parameters, buffers, the batch) and the parameters' `.grad`, which a plan counts
    as static bytes. `ops` lists this rank's ops in the order in which they ran.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.ops: list[OpMemory] = []
        self._parameters = list(parameters)
        self._live = LiveStorages()

    @property
    def most_held_bytes(self) -> int:
        """The most bytes held between two ops: kept activations and boundary buffers."""
        return max((op.after_bytes for op in self.ops), default=0)

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at any time, including what an op needs while it runs."""
        return max((op.peak_bytes for op in self.ops), default=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._live.see(made, (args, kwargs))
        return made

    def op_ended(self, op: Op) -> None:
        """Called by the runtime after each op, before its output is sent."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._live.forget(parameter.grad)
        after_bytes = self._live.num_bytes()
        self.ops.append(OpMemory(op, max(self._live.peak_bytes, after_bytes), after_bytes))
        self._live.peak_bytes = 0
