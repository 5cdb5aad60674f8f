"""One rank's steps by hand, as a training script has them: one stage, one tensor between stages, no plan and no checks.

`ByHand` has a stream and a group for each direction to each neighbour, events between them and the compute stream, and
holds what it sends until it is through. `OnStreamsOfGroup` leaves streams to NCCL's process group, which has its own,
and lets the compute stream wait by `Work.wait`: the least that a script can do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

NUM_HELD = 2  # sent tensors of each channel whose send the compute stream has not waited for


class Channel:
    """One direction to or from a neighbour."""

    def __init__(self, sender: int, receiver: int) -> None:
        self.group: Any = dist.new_group([sender, receiver], None, backend="nccl")
        self.peer = int(dist.get_rank() == min(sender, receiver))
        self.stream = torch.Stream()
        self.held: deque[tuple[Tensor, Any]] = deque()


class ByHand:
    """`step()` runs `ops`, (kind, micro-batch), of a rank with neighbours on both sides."""

    def __init__(self, stage: nn.Module, ops: Sequence[tuple[str, int]], boundary: Tensor, rank: int) -> None:
        self.stage, self.ops, self.shape = stage, ops, boundary.shape
        self.parameters = [*stage.parameters()]
        self.inputs, self.outputs = Channel(rank - 1, rank), Channel(rank, rank + 1)
        self.gradients, self.input_gradients = Channel(rank + 1, rank), Channel(rank, rank - 1)
        self.held: dict[int, Any] = {}

    def step(self) -> None:
        """One step over the micro-batches."""
        self.compute = torch.accelerator.current_stream()
        ops, buffer = self.ops, self.allocate(self.ops[0][0])
        for i, (kind, m) in enumerate(ops):
            received, buffer = buffer, self.allocate(ops[i + 1][0]) if i + 1 < len(ops) else None
            if kind == "F":
                self.forward(m, received)
            elif kind == "B":
                self.backward(m, received)
            elif kind == "I":
                self.backward_input(m, received)
            else:
                self.backward_weight(m)
        for channel in (self.outputs, self.input_gradients):
            while channel.held:
                self.release(channel)

    def forward(self, m: int, received: Any) -> None:
        source = self.receive(self.inputs, received).requires_grad_()
        output = self.stage(source)
        self.send(self.outputs, output.detach())
        self.held[m] = source, output

    def backward(self, m: int, received: Any) -> None:
        source, output = self.held.pop(m)
        torch.autograd.backward(output, self.receive(self.gradients, received))
        self.send(self.input_gradients, source.grad)

    def backward_input(self, m: int, received: Any) -> None:
        source, output = self.held.pop(m)
        gradient = self.receive(self.gradients, received)
        (of_input,) = torch.autograd.grad(output, source, gradient, retain_graph=True)
        self.send(self.input_gradients, of_input)
        self.held[m] = output, gradient

    def backward_weight(self, m: int) -> None:
        output, gradient = self.held.pop(m)
        torch.autograd.backward(output, gradient, inputs=self.parameters)

    # --- messages -----------------------------------------------------------------------------------------------------

    def allocate(self, kind: str) -> Any:
        """The buffer of what an op reads, one op early, and the event behind all that used its memory before."""
        return (torch.empty(self.shape), self.compute.record_event()) if kind != "W" else None

    def receive(self, channel: Channel, allocated: Any) -> Tensor:
        buffer, event = allocated
        channel.stream.wait_event(event)
        with channel.stream:
            dist.irecv(buffer, group=channel.group, group_src=channel.peer).wait()
        self.compute.wait_stream(channel.stream)
        return buffer

    def send(self, channel: Channel, tensor: Tensor) -> None:
        channel.stream.wait_stream(self.compute)
        with channel.stream:
            dist.isend(tensor, group=channel.group, group_dst=channel.peer).wait()
        channel.held.append((tensor, channel.stream.record_event()))
        if len(channel.held) > NUM_HELD:
            self.release(channel)

    def release(self, channel: Channel) -> None:
        _, sent = channel.held.popleft()
        self.compute.wait_event(sent)


class OnStreamsOfGroup(ByHand):
    """The group's own stream waits for the current one by itself."""

    def allocate(self, kind: str) -> Any:
        return torch.empty(self.shape) if kind != "W" else None

    def receive(self, channel: Channel, allocated: Any) -> Tensor:
        dist.irecv(allocated, group=channel.group, group_src=channel.peer).wait()
        return allocated

    def send(self, channel: Channel, tensor: Tensor) -> None:
        channel.held.append((tensor, dist.isend(tensor, group=channel.group, group_dst=channel.peer)))
        if len(channel.held) > NUM_HELD:
            self.release(channel)

    def release(self, channel: Channel) -> None:
        _, work = channel.held.popleft()
        work.wait()
