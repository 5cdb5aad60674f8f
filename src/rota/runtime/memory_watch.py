"""A debug mode: how many bytes a rank's ops really hold, op by op, to lay beside what the plan says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, final

from torch import nn

from rota.runtime.live_storages import LiveStorages
from rota.runtime.torch_internals import TorchDispatchMode
from rota.tasks import Op


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
