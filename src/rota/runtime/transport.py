"""Values between ranks on `torch.distributed`: receives posted, sends released as soon as they are through.

A step in which shapes may be new sends each activation's layout ahead of it; the others send tensors alone, into
buffers that the receiver allocates when it posts.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rota.errors import LostRankError, PipelineError
from rota.plan import Transfer
from rota.runtime.messages import (
    Layout,
    describe,
    empty,
    flatten,
    from_bytes,
    gradient_layouts,
    tensor_layouts,
    to_bytes,
    unflatten,
)
from rota.runtime.program import Message, ValueKey


@dataclass(slots=True)
class _Arriving:
    message: Message
    works: list[Any]
    buffers: list[torch.Tensor]
    layout: Layout | None  # None: gradients, a plain list


class Transport:
    """One rank's messages. `sent_ns` and `through_ns` hold the last step's times by (route, position)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.layouts: dict[ValueKey, Layout] = {}  # of activations, by (edge, False, micro-batch)
        self._arriving: dict[ValueKey, _Arriving] = {}
        self.sent_ns: dict[tuple[int, int], int] = {}
        self.through_ns: dict[tuple[int, int], int] = {}
        # Gloo tells that a send is through only to whoever waits for it: one thread waits, and lets the tensors go.
        self._sending: queue.SimpleQueue[tuple[Message, list[Any], list[torch.Tensor]] | None] = queue.SimpleQueue()
        self._all_through = threading.Event()
        self._failure: LostRankError | None = None
        self.oldest: Transfer | None = None  # of those not through yet
        self._reaper = threading.Thread(target=self._reap, name="rota-sends", daemon=True)
        self._reaper.start()

    # --- receiving ------------------------------------------------------------------------------------------------

    def post(self, message: Message, with_layout: bool) -> None:
        """Start to receive; `with_layout` waits for the layout that comes first."""
        edge, is_gradient, microbatch = message.value
        key = (edge, False, microbatch)
        if with_layout and not is_gradient:
            self.layouts[key] = self._receive_layout(message)
        layout = self.layouts[key]
        wanted = gradient_layouts(layout) if is_gradient else tensor_layouts(layout)
        buffers = [empty(tensor) for tensor in wanted]
        works = [self._receive(buffer, message) for buffer in buffers]
        self._arriving[message.value] = _Arriving(message, works, buffers, None if is_gradient else layout)

    def _receive_layout(self, message: Message) -> Layout:
        size = torch.empty(1, dtype=torch.int64)
        _wait(self._receive(size, message), message)
        data = torch.empty(int(size), dtype=torch.uint8)
        _wait(self._receive(data, message), message)
        return from_bytes(data)

    def _receive(self, buffer: torch.Tensor, message: Message) -> Any:
        try:
            return dist.irecv(buffer, group_src=message.transfer.sender, group=self._group)
        except RuntimeError as error:
            raise _lost(message.transfer.sender, message) from error

    def take(self, key: ValueKey) -> Any:
        """Wait for a posted value: an activation (tensors that want a gradient are leaves) or a list of gradients."""
        arriving = self._arriving.pop(key)
        for work in arriving.works:
            _wait(work, arriving.message)
        if arriving.layout is None:
            return arriving.buffers
        for buffer, layout in zip(arriving.buffers, tensor_layouts(arriving.layout), strict=True):
            buffer.requires_grad_(layout[3])
        return unflatten(iter(arriving.buffers), arriving.layout)

    # --- sending --------------------------------------------------------------------------------------------------

    def send_value(self, message: Message, value: object, with_layout: bool) -> None:
        """Send an activation; its layout first if this step says so, else it must be as before."""
        where = f"stage {message.transfer.source.stage}"
        tensors, layout = flatten(value, where)
        known = self.layouts.get(message.value)
        first = []
        if with_layout:
            self.layouts[message.value] = layout
            data = to_bytes(layout)
            first = [torch.tensor([len(data)]), data]
        elif layout != known:
            raise PipelineError(
                f"{message.transfer}: {where} made {describe(layout)}, after {describe(known or ())} in an earlier "
                f"step with inputs of the same shapes; if its shapes depend on the data, use "
                f"Pipeline(…, dynamic_shapes=True)"
            )
        self._send(message, first + [tensor.detach() for tensor in tensors])

    def send_gradients(self, message: Message, gradients: list[torch.Tensor]) -> None:
        self._send(message, gradients)

    def _send(self, message: Message, tensors: list[torch.Tensor]) -> None:
        self.sent_ns[message.column] = time.monotonic_ns()
        tensors = [tensor.contiguous() for tensor in tensors]
        receiver = message.transfer.receiver
        try:
            works = [dist.isend(tensor, group_dst=receiver, group=self._group) for tensor in tensors]
        except RuntimeError as error:
            raise _lost(receiver, message) from error
        self._sending.put((message, works, tensors))

    def _reap(self) -> None:
        while (entry := self._sending.get()) is not None:
            message, works, tensors = entry
            del entry
            if message is _MARK:
                self._all_through.set()
                continue
            self.oldest = message.transfer
            try:
                while works:
                    works.pop(0).wait()
            except Exception:
                self._failure = self._failure or _lost(message.transfer.receiver, message)
            self.through_ns[message.column] = time.monotonic_ns()
            self.oldest = None
            del works, tensors  # nothing sent may outlive its transfer, and a work holds what it sends

    def drain(self) -> None:
        """Wait until everything sent is through."""
        self._all_through.clear()
        self._sending.put((_MARK, [], []))
        self._all_through.wait()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._sending.put(None)
        self._reaper.join(timeout=1)  # stuck only where a peer does not receive
        del self._group


_MARK: Any = object()
_REMEDY = "look there for the first error"  # rather than Gloo's own words, which tell of sockets


@contextmanager
def together(doing: str) -> Iterator[None]:
    """Around a collective: tells what was going on when a rank got lost."""
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(f"lost a rank while {doing}: {_REMEDY}") from error


def _wait(work: Any, message: Message) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise _lost(message.transfer.sender, message) from error


def _lost(peer: int, message: Message) -> LostRankError:
    doing = "waiting for" if peer == message.transfer.sender else "sending"
    return LostRankError(f"lost rank {peer} while {doing} {message.transfer}: {_REMEDY}")
