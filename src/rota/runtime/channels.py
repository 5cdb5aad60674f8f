"""Values between ranks on queued devices: for each directed pair of ranks a stream and a two-rank process group.

    rank 0   compute  run 0F1 ─event─┐                       release: waits for the send, then lets go of the value
             0→1                     └▶ send ──▶
    rank 1   0→1                  event ┐  ▶ receive ─event─┐
             compute  allocate ─────────┘                   └▶ run 1F1

`Execution` lets streams wait as the steps of `rota.core.programs.device_steps` say. Layouts travel between the hosts,
by `Transport`, as do the flags of gradients; only tensors go by a channel. One big group would do for neither: its
messages all share one stream per pair, and both directions would wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, final

import torch
import torch.distributed as dist

from rota.core.plan import Plan
from rota.core.programs.actions import Message, ValueKey
from rota.runtime.device.protocol import Mark, QueuedDevice
from rota.runtime.meshes import Processes
from rota.runtime.messages import Format
from rota.runtime.recorder import Column, Marks, Pair
from rota.runtime.transport import (
    Transport,
    activation,
    as_sent,
    as_tensors,
    collective,
    expected,
    lost,
    outgoing,
    outgoing_gradients,
)
from rota.torch_internals import backend_of, message_options, move_message

#: What gives a step to the stream that it gets, and returns the mark behind it; None if it has none.
OnStream: TypeAlias = Callable[[Any], Mark]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """A message's way through its channel, the same in every step.

    `position`: of the op that made the value, in the rank's order, if it is sent here. `options`: for `move_message` in
    the channel's group. Each passage is equal to only itself: a placement may have an edge twice.
    """

    message: Message
    position: int
    value: ValueKey
    column: Column
    channel: Pair
    backend: Any
    options: Any


@final
class Channels:
    """One rank's messages. Making it is collective. What it binds returns the mark behind a step on its stream."""

    def __init__(self, plan: Plan, device: QueuedDevice, hosts: Transport, processes: Processes) -> None:
        self._device, self._hosts, self._where = device, hosts, device.torch_device
        self.marks = Marks()
        self._backends = _open(plan, device, processes)
        self._buffers: dict[Passage, tuple[list[torch.Tensor], Format, Mark]] = {}
        self._arriving: dict[ValueKey, tuple[list[torch.Tensor], Format]] = {}
        self._flags: dict[ValueKey, tuple[Message, tuple[torch.Tensor, Any]]] = {}  # of gradients that arrive
        self._sent: dict[Passage, list[torch.Tensor]] = {}  # held until their release

    def passage(self, message: Message, position: int) -> Passage:
        """The way of a message that is sent or received here."""
        channel = message.transfer.sender, message.transfer.receiver
        return Passage(message, position, message.value, message.column, channel, *self._backends[channel])

    def begin(self, marks: Marks) -> None:
        """A new step; `marks` gets the times of its messages."""
        self.marks = marks
        self._flags.clear()
        held: list[dict[Any, Any]] = [self._buffers, self._arriving, self._sent]
        if any(held):  # by a failed step, whose kernels may still use it
            self._device.synchronize()
        for of_step in held:
            of_step.clear()

    def allocating(self, passage: Passage, formats: dict[ValueKey, Format], learns: bool) -> OnStream:
        """What allocates the buffers of a message from the pool of a stream; its mark is behind their earlier use.

        If it `learns`, the sender's host sends their layout first. The buffers are new ones each time: autograd, hooks
        and modules may hold on to them, and must not see them change.
        """
        key, where, mark_on, hosts = passage.value, self._where, self._device.mark_on, self._hosts
        learns = learns and not key[1]

        def allocate(stream: Any) -> Mark:
            if learns:
                formats[key] = Format(hosts.receive_layout(passage.message))
            form, shapes = expected(formats, key)
            buffers = [torch.empty(shape, dtype=dtype, device=where) for shape, dtype in shapes]
            mark = mark_on(stream)
            self._buffers[passage] = buffers, form, mark
            return mark

        return allocate

    def receiving(self, passage: Passage) -> OnStream:
        """What enqueues the receive of a message."""
        key, hosts, use, mark_on = passage.value, self._hosts, self._device.use, self._device.mark_on
        edge, is_gradient, _ = key

        def receive(stream: Any) -> Mark:
            buffers, form, allocated = self._buffers.pop(passage)
            if is_gradient and hosts.flags.travel(edge, len(buffers)):
                self._flags[key] = passage.message, hosts.post_flags(passage.message, form)
            try:
                with use(stream):
                    for buffer in buffers:
                        move_message(passage.backend, as_sent(buffer), passage.options)
            except dist.DistError as error:
                raise lost(passage.message.transfer.sender, passage.message) from error
            end = mark_on(stream)
            self.marks.receives.append((passage.column, passage.channel, allocated, end))
            self._arriving[key] = buffers, form
            return end

        return receive

    def taking(self, key: ValueKey) -> Callable[[], Any]:
        """What gives a received value: an activation (tensors that need a gradient are leaves) or a list of gradients.

        A gradient that is missing is None: the host waits for flags, if there are any.
        """

        def take() -> Any:
            buffers, form = self._arriving.pop(key)
            if not key[1]:
                return activation(buffers, form)
            if key not in self._flags:
                return buffers
            return self._hosts.flags.read(key[0], self._hosts.take_flags(*self._flags.pop(key)), buffers)

        return take

    def sending(
        self, passage: Passage, take: Callable[[], Any], formats: dict[ValueKey, Format], learns: bool
    ) -> OnStream:
        """What enqueues the send of the value that `take` gives."""
        if passage.value[1]:
            return partial(self._send_gradients, passage, take, formats)
        return partial(self._send_value, passage, take, formats, learns)

    def _send_value(
        self, passage: Passage, take: Callable[[], Any], formats: dict[ValueKey, Format], learns: bool, stream: Any
    ) -> Mark:
        layout, tensors = outgoing(formats, passage.message, take(), learns)
        if layout is not None:
            self._hosts.send(passage.message, as_tensors(layout))
        with self._device.use(stream):
            return self._send(passage, tensors, stream)

    def _send_gradients(
        self, passage: Passage, take: Callable[[], Any], formats: dict[ValueKey, Format], stream: Any
    ) -> Mark:
        gradients = take()
        with self._device.use(stream):  # zeros are made by a kernel of this stream
            flags, tensors = outgoing_gradients(self._hosts.flags, formats, passage.message, gradients, self._where)
            if flags is not None:
                self._hosts.send(passage.message, [flags])
            return self._send(passage, tensors, stream)

    def _send(self, passage: Passage, tensors: list[torch.Tensor], stream: Any) -> Mark:
        held = [*tensors]
        try:
            for tensor in tensors:
                sent = as_sent(tensor)  # here: a copy that it makes is a kernel of this stream
                held.append(sent)
                move_message(passage.backend, sent, passage.options)
        except dist.DistError as error:
            raise lost(passage.message.transfer.receiver, passage.message) from error
        end = self._device.mark_on(stream)
        self.marks.sends.append((passage.column, passage.channel, passage.position, end))
        self._sent[passage] = held
        return end

    def releasing(self, passage: Passage) -> OnStream:
        """What lets go of what was sent, on a stream that has waited for the send."""
        return lambda _: self._sent.__delitem__(passage)

    def drain(self) -> None:
        """Wait until all layouts are through, on the host. Raises LostRankError if one is not."""
        self._hosts.drain()

    def close(self) -> None:
        """Release the process groups."""
        self._backends.clear()


def _open(plan: Plan, device: QueuedDevice, processes: Processes) -> dict[Pair, tuple[Any, Any]]:
    """For each channel of this rank its backend, and the options of its messages. Collective.

    All ranks make and use the groups in one order. The first message makes a group's communicator, which blocks the
    host until the other side does the same: so it must not be one of a step.
    """
    backends: dict[Pair, tuple[Any, Any]] = {}
    for pair in sorted({(route.sender, route.receiver) for route in plan.placement.routes if not route.is_copy}):
        with collective(f"opening the channel from rank {pair[0]} to rank {pair[1]}"):
            group = processes.of_ranks(pair, device.backend)
            if group is None:
                continue
            backend = backend_of(group, device.torch_device)
            options = message_options(int(pair[0] > pair[1]))  # a group numbers its ranks in ascending order
            move_message(backend, torch.zeros(1, device=device.torch_device), options)
            device.synchronize()
        backends[pair] = backend, options
    return backends
