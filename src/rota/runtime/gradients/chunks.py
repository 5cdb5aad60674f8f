"""What the chunks of a sample pass on to later ones in a stage, and the gradients that come back.

    F of chunk c     k, v ──detach──▶ leaves ──▶ read by the forwards of later chunks
    B of chunk c     k, v ◀── their gradients ── leaf.grad ◀── added up by the backwards of later chunks

The backward of a chunk comes after those of all later ones, so its leaves have all gradients by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn

from rota.core.errors import PipelineError
from rota.models import collect_losses
from rota.models.modes import evaluating
from rota.models.sequence_chunks import Chunk
from rota.runtime.messages import hand_over, over_tensors, tensors_in, with_tensors

Leaves = list[torch.Tensor]


def length_of(values: Iterable[Any], where: str) -> int:
    """The length of a chunk: dimension 1 of the first tensor with several. Raises PipelineError if there is none."""
    length = next((tensor.shape[1] for value in values for tensor in tensors_in(value) if tensor.dim() > 1), None)
    if length is None:
        raise PipelineError(f"{where} gets no tensor of shape [rows, length, …], so the length of a chunk is unknown")
    return length


@final
class PassedOn:
    """The values that chunks have passed on in a step, by stage and micro-batch, for as long as others need them."""

    def __init__(self) -> None:
        self._samples: dict[int, Sequence[int]] = {}  # of each chunk, all chunks of its sample
        self._leaves: dict[tuple[int, int], Leaves] = {}
        self._ends: dict[tuple[int, int], int] = {}  # the position in the sample behind each chunk
        #: What each stage gets of a first chunk until the second one comes, and the stages that were checked then.
        self._first: dict[int, tuple[int, tuple[Any, ...]]] = {}
        self._checked: set[int] = set()

    def begin(self, chunks: Sequence[Sequence[int]]) -> None:
        """Begin a step with these samples in chunks, and drop what the one before left."""
        self._samples = {m: row for row in chunks for m in row}
        self._leaves.clear()
        self._ends.clear()
        self._first.clear()
        Chunk.step_has_chunks = bool(chunks)

    def __contains__(self, microbatch: int) -> bool:
        return microbatch in self._samples

    def before(self, microbatch: int) -> Sequence[int]:
        """The chunks of its sample before this one."""
        sample = self._samples[microbatch]
        return sample[: sample.index(microbatch)]

    def open(self, stage: int, microbatch: int, module: nn.Module, where: str, values: tuple[Any, ...]) -> Chunk:
        """What the forward of a chunk reads, which gets these `values`. Of the first two, the stage is checked.

        `where`: the stage's name, for messages.
        """
        before = self.before(microbatch)
        if stage not in self._checked:
            if not before and stage not in self._first:
                self._first[stage] = microbatch, copied(values)
            elif len(before) == 1 and self._first[stage][0] == before[0]:
                refuse_other_than_whole(module, where, self._first.pop(stage)[1], values)
                self._checked.add(stage)
        start = self._ends[stage, before[-1]] if before else 0
        self._ends[stage, microbatch] = start + length_of(values, where)
        return Chunk(start, [self._leaves[stage, m] for m in before])

    def close(self, stage: int, microbatch: int, chunk: Chunk) -> Leaves:
        """The leaves that stand for what a chunk passes on; where its forward is run again, those of the first time."""
        key = stage, microbatch
        if key not in self._leaves:
            self._leaves[key] = hand_over(chunk.passed_on())
        leaves = self._leaves[key]
        if not torch.is_grad_enabled() and microbatch == self._samples[microbatch][-1]:
            for m in self._samples[microbatch]:
                del self._leaves[stage, m]
        return leaves

    def release(self, stage: int, microbatch: int) -> None:
        """After the backward of a chunk, the last that needs what it passed on."""
        self._leaves.pop((stage, microbatch), None)


# --- the check --------------------------------------------------------------------------------------------------------


def copied(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values with copies of their tensors, which a stage may write into."""
    return tuple(over_tensors(lambda tensor: tensor.detach().clone(), value) for value in values)


def refuse_other_than_whole(module: nn.Module, where: str, first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    """Raises PipelineError unless the stage's outputs for two chunks are those for both at once.

    This finds attention that is not causal, keys and values that do not go through `rota.with_earlier_chunks`, and
    positions that do not begin at `rota.chunk_start()`. It runs once per stage, without gradients, in eval(). `first`
    and `second`: what the stage gets for the first two chunks of a sample.
    """
    with torch.no_grad(), evaluating([module]), _with_buffers_kept(module), collect_losses():
        length = length_of(first, where)
        with Chunk() as chunk:
            begin = module(*copied(first))
        with Chunk(length, [chunk.passed_on()]):
            rest = module(*copied(second))
        joined = tuple(_join(a, b) for a, b in zip(first, second, strict=True))
        with Chunk():
            whole = module(*joined)
    for a, b, expected in zip(*map(tensors_in, (begin, rest, whole)), strict=True):
        if a.dim() < 2 or not a.is_floating_point():
            continue
        in_chunks = torch.cat([a, b], 1)
        if in_chunks.shape != expected.shape or _differ(in_chunks, expected):
            raise PipelineError(
                f"{where} computes something else for two chunks of a sample than for both at once; let its attention "
                f"be causal, with keys and values through rota.with_earlier_chunks and positions from "
                f"rota.chunk_start(), and every tensor have its length in dimension 1; or plan without chunks"
            )


def _join(first: Any, second: Any) -> Any:
    pairs = zip(tensors_in(first), tensors_in(second), strict=True)
    return with_tensors(first, (torch.cat(pair, 1) if pair[0].dim() > 1 else pair[0] for pair in pairs))


def _differ(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    dtype = actual.dtype
    if torch.is_autocast_enabled(actual.device.type):
        dtype = torch.get_autocast_dtype(actual.device.type)
    are_equal = (actual == expected) | (actual.isnan() & expected.isnan())  # -inf - -inf is NaN
    difference = (actual - expected).abs().masked_fill(are_equal, 0.0).amax()
    largest = expected.abs().nan_to_num(nan=0.0, posinf=0.0).amax()
    return not bool(difference <= largest * torch.finfo(dtype).eps ** 0.75)


@contextmanager
def _with_buffers_kept(module: nn.Module) -> Iterator[None]:
    """With buffers as they were afterwards."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, before in buffers:
            if not torch.equal(buffer, before):
                buffer.copy_(before)
