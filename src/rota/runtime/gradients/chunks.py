"""What the chunks of a sample pass on to later ones in a stage, and the gradients that come back.

    F of chunk c     k, v ──detach──▶ leaves ──▶ read by the forwards of later chunks
    B of chunk c     k, v ◀── their gradients ── leaf.grad ◀── added up by the backwards of later chunks

The backward of a chunk comes after those of all later ones, so its leaves have all gradients by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch

from rota.core.errors import PipelineError
from rota.models.sequence_chunks import Chunk
from rota.runtime.messages import tensors_in

Leaves = list[torch.Tensor]


def length_of(values: Iterable[Any], where: str) -> int:
    """The length of a chunk: dimension 1 of the first tensor with several. Raises PipelineError if there is none."""
    found = next((tensor.shape[1] for value in values for tensor in tensors_in(value) if tensor.dim() > 1), None)
    if found is None:
        raise PipelineError(f"{where} gets no tensor of shape [rows, length, …], so the length of a chunk is unknown")
    return found


def leaves_of(values: Iterable[torch.Tensor]) -> Leaves:
    """What stands for values that a chunk passes on: the same memory, with gradients of its own."""
    return [value.detach().requires_grad_(value.requires_grad) for value in values]


@final
class PassedOn:
    """The values that chunks have passed on in a step, by stage and micro-batch, for as long as others need them."""

    def __init__(self) -> None:
        self._samples: dict[int, Sequence[int]] = {}  # of each chunk, all chunks of its sample
        self._leaves: dict[tuple[int, int], Leaves] = {}
        self._ends: dict[tuple[int, int], int] = {}  # the position in the sample behind each chunk

    def begin(self, chunks: Sequence[Sequence[int]]) -> None:
        """Begin a step with these samples in chunks, and drop what the one before left."""
        self._samples = {m: row for row in chunks for m in row}
        self._leaves.clear()
        self._ends.clear()
        Chunk.step_has_chunks = bool(chunks)

    def __contains__(self, microbatch: int) -> bool:
        return microbatch in self._samples

    def __bool__(self) -> bool:
        return bool(self._samples)

    def place(self, microbatch: int) -> int:
        """The place of a chunk in its sample."""
        return self._samples[microbatch].index(microbatch)

    def before(self, microbatch: int) -> Sequence[int]:
        """The chunks before this one."""
        return self._samples[microbatch][: self.place(microbatch)]

    def open(self, stage: int, microbatch: int, length: int) -> Chunk:
        """What the forward of a chunk of this length reads."""
        before = self.before(microbatch)
        start = self._ends[stage, before[-1]] if before else 0
        self._ends[stage, microbatch] = start + length
        return Chunk(start, [self._leaves[stage, m] for m in before])

    def close(self, stage: int, microbatch: int, chunk: Chunk) -> Leaves:
        """The leaves that stand for what a chunk passes on; where its forward is run again, those of the first time."""
        key, values = (stage, microbatch), chunk.passed_on()
        if key not in self._leaves:
            self._leaves[key] = leaves_of(values)
        leaves = self._leaves[key]
        if not torch.is_grad_enabled() and microbatch == self._samples[microbatch][-1]:
            for m in self._samples[microbatch]:
                del self._leaves[stage, m]
        return leaves

    def release(self, stage: int, microbatch: int) -> None:
        """After the backward of a chunk, the last that needs what it passed on."""
        self._leaves.pop((stage, microbatch), None)
