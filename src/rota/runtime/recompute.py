"""A forward that keeps no activations, and the same forward again when they are needed.

The second one gets the same inputs and the same random state (the caller's matter), and buffers as they were before
the first: it computes the same, and what it does to buffers, such as BatchNorm's statistics, is not done twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from rota.errors import PipelineError


@dataclass(slots=True)
class Again:
    """What a first forward leaves for the second: what it received, and the buffers that it changed, as before."""

    received: list[Any]
    buffers: dict[str, torch.Tensor]


@contextmanager
def without_activations(module: nn.Module, received: list[Any], where: str) -> Iterator[Again]:
    """Around a first forward; the result is complete after it.

    Autograd's graph is made, since it tells which outputs want a gradient, but nothing is saved in it.
    """
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    again = Again(received, {})
    versions = [tensor._version for tensor in _tensors(received)]
    with saved_tensors_hooks(lambda _: None, _refuse):
        yield again
    if versions != [tensor._version for tensor in _tensors(received)]:
        raise PipelineError(
            f"{where} writes into what it receives, which its recomputation needs unchanged; let it begin with an "
            f"operation that is not in place, or plan without recomputation"
        )
    after = dict(module.named_buffers())
    again.buffers = {name: old for name, old in before.items() if not torch.equal(old, after[name])}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _refuse(_: None) -> torch.Tensor:
    raise PipelineError("a stage that is recomputed differentiates inside its forward; plan without recomputation")
