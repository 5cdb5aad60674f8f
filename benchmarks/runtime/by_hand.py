"""1F1B by hand, for one stage a rank and one tensor between stages: what a pipeline costs at the very least.

No plan, no checks, no recorder: each op posts the receive of the next one, waits for its own, computes and sends. What
was sent is released during the step, as a script must do whose micro-batches are large: by a thread, as Gloo tells the
end of a send only to whoever waits for it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Sends:
    """Waits for sends in a thread, which polls while some are pending, and holds their tensors until then."""

    def __init__(self) -> None:
        self.pending: deque[tuple[dist.Work, Tensor]] = deque()
        self.wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.lock, self.awake = threading.Lock(), False
        threading.Thread(target=self.run, daemon=True).start()

    def add(self, tensor: Tensor, peer: int) -> None:
        self.pending.append((dist.isend(tensor, peer), tensor))
        if not self.awake:
            self.awake = True
            self.wake.put(True)

    def run(self) -> None:
        while self.wake.get():
            while self.pending:
                time.sleep(0.001)
                self.wait()
            self.awake = False

    def wait(self) -> None:
        with self.lock:
            while self.pending:
                self.pending[0][0].wait()
                self.pending.popleft()


class ByHand:
    """`step(inputs, targets)` leaves the gradients in the stage's parameters; on the last rank it gives the losses."""

    def __init__(
        self, stage: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], boundary: Tensor, num_microbatches: int
    ) -> None:
        self.stage = stage
        self.loss = loss
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.is_first, self.is_last = self.rank == 0, self.rank == self.num_ranks - 1
        self.num_microbatches = num_microbatches
        self.sends = Sends()
        num_held = min(self.num_ranks - self.rank, num_microbatches) + 1  # those between F and B, and one on its way
        self.inputs = [torch.empty_like(boundary) for _ in range(num_held)]
        self.gradients = [torch.empty_like(boundary) for _ in range(2)]
        warm_up = min(self.num_ranks - 1 - self.rank, num_microbatches)
        self.ops = [("F", m) for m in range(warm_up)]
        for m in range(num_microbatches):
            if m + warm_up < num_microbatches:
                self.ops.append(("F", m + warm_up))
            self.ops.append(("B", m))

    def step(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        """One step over the micro-batches; only the first rank reads `inputs`, only the last one `targets`."""
        losses: list[Tensor] = []
        held: list[tuple[Tensor | None, Tensor] | None] = [None] * self.num_microbatches
        work = self.post(*self.ops[0])
        for i, (kind, m) in enumerate(self.ops):
            following = self.post(*self.ops[i + 1]) if i + 1 < len(self.ops) else None
            if work is not None:
                work.wait()
            work = following
            if kind == "F":
                self.forward(m, inputs, targets, held, losses)
            else:
                self.backward(m, held)
        self.sends.wait()
        return losses

    def post(self, kind: str, m: int) -> dist.Work | None:
        """The receive that an op needs, started."""
        if kind == "F":
            return None if self.is_first else dist.irecv(self.inputs[m % len(self.inputs)], self.rank - 1)
        return None if self.is_last else dist.irecv(self.gradients[m % 2], self.rank + 1)

    def forward(self, m, inputs, targets, held, losses) -> None:  # type: ignore[no-untyped-def]
        if self.is_first:
            source, output = None, self.stage(inputs[m])
        else:
            source = self.inputs[m % len(self.inputs)].detach().requires_grad_()
            output = self.stage(source)
        if self.is_last:
            output = self.loss(output, targets[m]) / self.num_microbatches
            losses.append(output.detach())
        else:
            self.sends.add(output.detach(), self.rank + 1)
        held[m] = source, output

    def backward(self, m, held) -> None:  # type: ignore[no-untyped-def]
        source, output = held[m]
        held[m] = None
        if self.is_last:
            output.backward()
        else:
            torch.autograd.backward(output, self.gradients[m % 2])
        if source is not None:
            self.sends.add(source.grad, self.rank - 1)
