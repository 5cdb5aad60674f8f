"""Values between ranks on queued devices: for each directed pair of ranks a stream and a two-rank process group.

    rank 0   compute  run 0F1 ─event─┐                       release: waits for the send, then lets go of the value
             0→1                     └▶ send ──▶
    rank 1   0→1                  event ┐  ▶ receive ─event─┐
             compute  allocate ─────────┘                   └▶ run 1F1

`Execution` lets streams wait as the steps of `rota.programs.device_steps` say. Layouts travel between the hosts, by
`Transport`: tensors alone go by a channel. One big group would do for neither: its messages all share one stream per
pair, and both directions would wait for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist

from rota.plan import Plan
from rota.programs.actions import Message, ValueKey
from rota.runtime.device.protocol import Mark, QueuedDevice
from rota.runtime.meshes import Processes
from rota.runtime.messages import Format
from rota.runtime.recorder import Marks
from rota.runtime.transport import Transport, activation, as_sent, collective, expected, lost, outgoing
from rota.torch_internals import backend_of

Pair = tuple[int, int]


@final
class Channels:
    """One rank's messages. Making it is collective. `marks` gets the times of the messages of a step."""

    def __init__(self, plan: Plan, device: QueuedDevice, hosts: Transport, processes: Processes) -> None:
        self._device, self._hosts = device, hosts
        self.formats: dict[ValueKey, Format] = {}
        self.marks = Marks()
        self._backends = _open(plan, device, processes)
        self._buffers: dict[Message, list[list[torch.Tensor]]] = defaultdict(list)  # a placement may have an edge twice
        self._arriving: dict[ValueKey, tuple[list[torch.Tensor], Format]] = {}
        self._sent: dict[Message, list[list[torch.Tensor]]] = defaultdict(list)  # held until their release

    def begin(self, marks: Marks, formats: dict[ValueKey, Format]) -> None:
        """A new step."""
        self.marks, self.formats = marks, formats
        left = [of for of in (self._buffers, self._arriving, self._sent) if any(of.values())]
        if left:  # by a failed step, whose kernels may still use it
            self._device.synchronize()
        for of_step in left:
            of_step.clear()

    def allocate(self, message: Message, with_layout: bool) -> None:
        """Allocate the buffers of a message; `with_layout`: once the sender's host has sent their layout.

        They are new ones each time: autograd, hooks and modules may hold on to them, and must not see them change.
        """
        if with_layout and not message.value[1]:
            self.formats[message.value] = Format(self._hosts.receive_layout(message))
        _, wanted = expected(self.formats, message)
        where = self._device.torch_device
        self._buffers[message].append([torch.empty(shape, dtype=dtype, device=where) for shape, dtype in wanted])

    def receive(self, message: Message, stream: Any) -> Mark:
        """Enqueue the receive; returns the mark behind it."""
        buffers = self._buffers[message].pop(0)
        backend, peer = self._backends[message.transfer.sender, message.transfer.receiver]
        with self._enqueueing(message, stream, message.transfer.sender):
            self.marks.receiving[message.column] = self._device.mark()
            for buffer in buffers:
                backend.recv([as_sent(buffer)], peer, 0).wait()
            self.marks.received[message.column] = end = self._device.mark()
        self._arriving[message.value] = buffers, expected(self.formats, message)[0]
        return end

    def take(self, key: ValueKey) -> Any:
        """A received value: an activation (tensors that need a gradient are leaves) or a list of gradients."""
        buffers, form = self._arriving.pop(key)
        return buffers if key[1] else activation(buffers, form)

    def send_value(self, message: Message, value: Any, with_layout: bool, stream: Any) -> Mark:
        """Enqueue the send of an activation; returns the mark behind it."""
        layout, tensors = outgoing(self.formats, message, value, with_layout)
        if layout is not None:
            self._hosts.send_layout(message, layout)
        return self.send_gradients(message, tensors, stream)

    def send_gradients(self, message: Message, tensors: list[torch.Tensor], stream: Any) -> Mark:
        """Enqueue the send of some tensors; returns the mark behind it."""
        backend, peer = self._backends[message.transfer.sender, message.transfer.receiver]
        held = [*tensors]
        with self._enqueueing(message, stream, message.transfer.receiver):
            self.marks.sent[message.column] = self._device.mark()
            for tensor in tensors:
                held.append(as_sent(tensor))  # here: a copy that it makes is a kernel of this stream
                backend.send([held[-1]], peer, 0).wait()
            self.marks.through[message.column] = end = self._device.mark()
        self._sent[message].append(held)
        return end

    def release(self, message: Message) -> None:
        """Let go of what was sent; the compute stream has waited for the send."""
        del self._sent[message][0]

    def drain(self) -> None:
        """Wait until all layouts are through, on the host. Raises LostRankError if one is not."""
        self._hosts.drain()

    @contextmanager
    def _enqueueing(self, message: Message, stream: Any, peer: int) -> Iterator[None]:
        try:
            with self._device.use(stream):
                yield
        except dist.DistError as error:
            raise lost(peer, message) from error

    def close(self) -> None:
        """Release the process groups."""
        self._backends.clear()


def _open(plan: Plan, device: QueuedDevice, processes: Processes) -> dict[Pair, tuple[Any, int]]:
    """For each channel of this rank the backend and the other side's rank in it. Collective.

    All ranks make and use the groups in one order. The first message makes a group's communicator, which blocks the
    host until the other side does the same: so it must not be one of a step.
    """
    found: dict[Pair, tuple[Any, int]] = {}
    for pair in _pairs(plan):
        with collective(f"opening the channel from rank {pair[0]} to rank {pair[1]}"):
            group = processes.of_ranks(pair, device.backend)
            if group is None:
                continue
            backend, mine = backend_of(group, device.torch_device), processes.rank
            peer = int(mine == min(pair))  # a group numbers its ranks in ascending order
            first = torch.zeros(1, device=device.torch_device)
            (backend.send if mine == pair[0] else backend.recv)([first], peer, 0).wait()
            device.synchronize()
        found[pair] = backend, peer
    return found


def _pairs(plan: Plan) -> Iterable[Pair]:
    return sorted({(route.sender, route.receiver) for route in plan.placement.routes})
