"""Whether a stage computes the same for chunks as for the whole: two chunks at once against one after the other.

It finds attention that is not causal, keys and values that do not go through `rota.with_earlier_chunks`, and positions
that do not begin at `rota.chunk_start()`. It runs once per stage, without gradients, in eval(), so without dropout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rota.core.errors import PipelineError
from rota.models import collect_losses
from rota.models.modes import evaluating
from rota.models.sequence_chunks import Chunk
from rota.runtime.gradients.chunks import length_of
from rota.runtime.messages import over_tensors, tensors_in, with_tensors


def copied(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values with copies of their tensors, which a stage may write into."""
    return tuple(over_tensors(lambda tensor: tensor.detach().clone(), value) for value in values)


def refuse_other_than_whole(module: nn.Module, where: str, first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    """Raises PipelineError unless the stage's outputs for two chunks are those for both at once.

    Args:
        module: The stage.
        where: Its name, for the message.
        first: What the stage gets for the first chunk of a sample.
        second: The same for the second one.
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
        found = torch.cat([a, b], 1)
        if found.shape != expected.shape or _differ(found, expected):
            raise PipelineError(
                f"{where} computes something else for two chunks of a sample than for both at once; let its attention "
                f"be causal, with keys and values through rota.with_earlier_chunks and positions from "
                f"rota.chunk_start(), and every tensor have its length in dimension 1; or plan without chunks"
            )


def _join(first: Any, second: Any) -> Any:
    pairs = zip(tensors_in(first), tensors_in(second), strict=True)
    return with_tensors(first, (torch.cat(pair, 1) if pair[0].dim() > 1 else pair[0] for pair in pairs))


def _differ(found: torch.Tensor, expected: torch.Tensor) -> bool:
    dtype = found.dtype
    if torch.is_autocast_enabled(found.device.type):
        dtype = torch.get_autocast_dtype(found.device.type)
    are_equal = (found == expected) | (found.isnan() & expected.isnan())  # -inf - -inf is NaN
    difference = (found - expected).abs().masked_fill(are_equal, 0.0).amax()
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
