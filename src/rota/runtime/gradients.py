"""Forward and backward of one stage for one micro-batch, cut off at its boundaries.

    received value ──detach──▶ leaves ──▶ stage ──▶ outputs ──detach──▶ sent value
    sent gradients ◀────────── leaf.grad ◀─ autograd ◀─ gradient edges ◀── received gradients

Between the two only what autograd saved is kept: outputs are held by their gradient edges, not their data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rota.errors import PipelineError
from rota.models import Stages
from rota.runtime.messages import flatten


@dataclass(slots=True)
class Kept:
    """What a forward leaves for its backward: leaves by incoming edge, gradient edges by outgoing edge, the loss."""

    leaves: list[list[torch.Tensor]]
    outputs: list[list[GradientEdge]]
    loss: GradientEdge | None = None


def forward(stages: Stages, stage: int, received: list[Any], batch: Any) -> tuple[Any, list[Any], Kept]:
    """The stage's output, the value for each of its outgoing edges, and what to keep.

    `received`: the values of the incoming edges; their tensors that require a gradient must be leaves.
    """
    output = stages.call(stage, received, batch)
    values = [edge.take(output) for edge in stages.outgoing(stage)]
    where = f"stage {stage}"
    leaves = [[t for t in flatten(value, where)[0] if t.requires_grad] for value in received]
    return output, values, Kept(leaves, [gradient_edges(value) for value in values])


def gradient_edges(value: Any) -> list[GradientEdge]:
    """Where the gradients of the value's tensors enter the graph that made them."""
    return [get_gradient_edge(tensor) for tensor in flatten(value, "a stage")[0] if tensor.requires_grad]


def take_loss(
    kept: Kept, loss_fn: Callable[[Any, Any], torch.Tensor], output: Any, target: Any, weight: float
) -> float:
    """The micro-batch's own loss; its share `weight` of the mean is what the backward starts from."""
    loss = loss_fn(output, target)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise PipelineError(f"loss_fn returned {got}; it must return a tensor with one element, the mean loss")
    if loss.requires_grad:
        kept.loss = get_gradient_edge(loss * weight)
    return loss.item()


def backward(kept: Kept, received: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Accumulate the stage's parameter gradients; return the gradients for each incoming edge.

    `received`: for each outgoing edge the gradients of its tensors that require one.
    """
    roots = [edge for edges in kept.outputs for edge in edges]
    gradients: list[torch.Tensor | None] = [gradient for edge in received for gradient in edge]
    if kept.loss is not None:
        roots.append(kept.loss)
        gradients.append(None)
    if roots:
        torch.autograd.backward(roots, gradients)
    return [[torch.zeros_like(t) if t.grad is None else t.grad for t in leaves] for leaves in kept.leaves]


def warm_up() -> None:
    """Let torch load what the first backward from a gradient edge needs: 0.4 s, no part of the first step's time."""
    x = torch.zeros((), requires_grad=True)
    torch.autograd.backward([get_gradient_edge(x * 1)], [torch.zeros(())])


def hand_over(value: Any) -> Any:
    """A value for a stage on the same rank: the same memory, cut off from the graph that made it."""
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: hand_over(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(hand_over(item) for item in value)
    return value
