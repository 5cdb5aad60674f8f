"""Copies of a rank's state on the host, which steps may change while it is written.

    caller's stream   … optimizer │ weights, buffers ─┐            forwards, backwards …    ┌▶ optimizer
    checkpoint                                        └▶ optimizer's state ─────────────────┘

On an accelerator the copies go to pinned memory, and the host goes on at once. Whatever the caller enqueues after
`save` may write to weights and buffers: a forward to BatchNorm's statistics, averaging of weights by `.data`, of which
nothing tells. So these are copied on the caller's own stream, before all of it. The optimizer's state is larger, and
the optimizer alone writes to it: it is copied beside the next step, and the optimizer's next step waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch.optim import Optimizer

from rota.errors import PipelineError
from rota.runtime.checkpoints.optimizer_state import is_tensor_key
from rota.runtime.checkpoints.tensors import Layout
from rota.runtime.device.protocol import Device, is_queued
from rota.torch_internals import version_of

_STREAM = "checkpoint"


@final
class Copies:
    """Copies the state of a rank, and lets its optimizer wait for them. `close` releases the optimizer."""

    def __init__(self, device: Device, optimizer: Optimizer | None) -> None:
        self._device = device
        self._under_way: tuple[Any, list[tuple[torch.Tensor, int]]] | None = None
        self._hook: Any = None
        if optimizer is not None and is_queued(device):
            self._hook = optimizer.register_step_pre_hook(self._before_step)

    def start(self, layout: Layout) -> Callable[[], object]:
        """Copy all chunks; the result waits until they are on the host."""
        device = self._device
        if not is_queued(device):
            layout.copy(_any)
            return _nothing
        state = layout.tensors(is_tensor_key)
        layout.copy(lambda key: not is_tensor_key(key))
        side = device.stream(_STREAM)
        device.wait(side, device.mark())
        with device.use(side):
            layout.copy(is_tensor_key)
            for tensor in state:
                device.keep_for(tensor, side)
            copied = device.read(torch.zeros(1, device=device.torch_device))  # the side stream has waited for the rest
            self._under_way = device.mark(), [(tensor, version_of(tensor)) for tensor in state]
        return copied

    def forget(self) -> None:
        """The copies are there."""
        self._under_way = None

    def close(self) -> None:
        """Take the hook out of the optimizer."""
        if self._hook is not None:
            self._hook.remove()

    def _before_step(self, *_: object) -> None:
        if self._under_way is None:
            return
        event, state = self._under_way
        self._under_way = None
        assert is_queued(self._device)
        self._device.wait(self._device.current(), event)
        if any(version_of(tensor) != version for tensor, version in state):
            raise PipelineError(
                "the optimizer's state was written to between an asynchronous save and the optimizer's next step, as "
                "it was copied, so the checkpoint may have either value; call checkpoints.wait() before that"
            )


def _any(_: str) -> bool:
    return True


def _nothing() -> None:
    pass
