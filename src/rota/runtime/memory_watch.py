"""How many bytes of tensors are alive: of all that an operation makes, and op by op as a debug mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, final

import torch
from torch import nn

from rota.runtime.torch_internals import StorageReference, TorchDispatchMode, address_of, tensors_anywhere
from rota.tasks import Op


@final
class LiveStorages:
    """A storage counts once and whole, however many tensors view it: one of them keeps all of it alive."""

    def __init__(self) -> None:
        self._alive: dict[int, tuple[StorageReference, int]] = {}  # by the storage's address
        self._upper_bound_bytes = 0  # of what is alive, without looking for what has been freed since
        #: The most that was alive since this was last set to 0.
        self.peak_bytes = 0

    def see(self, made: Any, given: Any = ()) -> None:
        """Count the storages of all tensors in `made`, but those in `given`: views, or written in place."""
        there = {*map(address_of, storages(given))}
        for storage in storages(made):
            if (address := address_of(storage)) not in there:
                _, before = self._alive.get(address, (None, 0))
                self._alive[address] = StorageReference(storage), storage.nbytes()
                self._upper_bound_bytes += storage.nbytes() - before
        if self._upper_bound_bytes > self.peak_bytes:
            self.peak_bytes = max(self.peak_bytes, self.num_bytes())

    def forget(self, tensor: torch.Tensor) -> None:
        """Count this one no longer."""
        _, num_bytes = self._alive.pop(address_of(tensor.untyped_storage()), (None, 0))
        self._upper_bound_bytes -= num_bytes

    def num_bytes(self) -> int:
        """Of all that are alive now."""
        self._upper_bound_bytes = sum(self.alive().values())
        return self._upper_bound_bytes

    def alive(self) -> dict[int, int]:
        """By address the bytes of all that are alive now."""
        expired = [at for at, (storage, _) in self._alive.items() if storage.is_expired]
        for at in expired:
            del self._alive[at]
        return {at: num_bytes for at, (_, num_bytes) in self._alive.items()}


def storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """Of all tensors in a value."""
    return (tensor.untyped_storage() for tensor in tensors_anywhere(value))


class OpMemory(NamedTuple):
    """What was alive of all that came into being since the watch began: the most while `op` ran, and after it."""

    op: Op
    peak_bytes: int
    after_bytes: int


@final
class MemoryWatch(TorchDispatchMode):
    """While it is entered, every tensor that is made is seen: activations, boundary buffers, gradients on their way.

    Not counted: what was there before (parameters, buffers, the batch) and the parameters' `.grad`, which a plan has
    among its static bytes. `ops` lists this rank's ops in the order in which they ran.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[OpMemory] = []
        self._parameters = list(parameters)
        self._live = LiveStorages()

    @property
    def most_held_bytes(self) -> int:
        """The most that was held between two ops: kept activations and boundary buffers."""
        return max((op.after_bytes for op in self.ops), default=0)

    @property
    def peak_bytes(self) -> int:
        """The most that was alive at any time, what an op needs while it runs included."""
        return max((op.peak_bytes for op in self.ops), default=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._live.see(made, (args, kwargs))
        return made

    def op_ended(self, op: Op) -> None:
        """The runtime's call after each op, before what it made is sent."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._live.forget(parameter.grad)
        after_bytes = self._live.num_bytes()
        self.ops.append(OpMemory(op, max(self._live.peak_bytes, after_bytes), after_bytes))
        self._live.peak_bytes = 0
