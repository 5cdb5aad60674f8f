"""Forward and backward of one stage for one micro-batch, cut off at its boundaries.

    received value ──detach──▶ leaves ──▶ stage ──▶ outputs ──detach──▶ sent value
    sent gradients ◀────────── leaf.grad ◀─ autograd ◀─ gradient edges ◀── received gradients

Between the two only what autograd saved is kept: outputs are held by their gradient edges, not their data. Where the
backward is split (see `split_backward`), inputs are held by their gradient edges as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rota.errors import PipelineError
from rota.models import Stages
from rota.runtime.gradients.split_backward import WeightWork, enter, input_gradients
from rota.runtime.messages import flatten
from rota.runtime.torch_internals import run_backward, tensors_anywhere, version_of, writable, zeros_at


@dataclass(slots=True)
class Kept:
    """What a forward leaves for its backward: leaves by incoming edge, gradient edges by outgoing edge, the loss
    with the gradient that it starts from.

    For a split backward `entries` takes the place of `leaves`.
    """

    leaves: list[list[torch.Tensor]]
    outputs: list[list[GradientEdge]]
    loss: tuple[GradientEdge, torch.Tensor] | None = None
    entries: list[list[GradientEdge]] | None = None


def forward(
    stages: Stages,
    stage: int,
    received: list[Any],
    batch: Any,
    *,
    split: bool = False,
    buffers: Mapping[str, torch.Tensor] | None = None,
) -> tuple[Any, list[Any], Kept]:
    """The stage's output, the value for each of its outgoing edges, and what to keep.

    `received`: the values of the incoming edges; their tensors that require a gradient must be leaves, and the stage
    may write into them. `split`: for `backward_inputs` rather than `backward`. `buffers` stand in for the module's own
    of these names.
    """
    where = f"stage {stage} ({type(stages[stage]).__name__})"
    leaves = [_wanting_gradient(value, where) for value in received]
    entering = enter if split else writable
    received = [over_tensors(lambda t: entering(t) if t.requires_grad else t, value) for value in received]
    entered = [_wanting_gradient(value, where) for value in received]
    # Before the stage may write into them: that changes where their gradients go.
    kept = Kept([], [], entries=[[*map(get_gradient_edge, of)] for of in entered]) if split else Kept(leaves, [])
    if buffers:
        arguments = (*received, *stages.pick_inputs(stage, batch))
        output = torch.func.functional_call(stages[stage], dict(buffers), arguments)
    else:
        output = stages.call(stage, received, batch)
    if not split:
        tell_writes(chain(*leaves), chain(*entered))
    values = [edge.take(output) for edge in stages.outgoing(stage)]
    kept.outputs = [gradient_edges(value, where) for value in values]
    return output, values, kept


def tell_writes(leaves: Iterable[torch.Tensor], entered: Iterable[torch.Tensor]) -> None:
    """Count writes into what is `writable` as writes into the leaf: autograd and the caller look for them there."""
    for leaf, same in zip(leaves, entered, strict=True):
        if same is not leaf and version_of(same):
            torch.autograd.graph.increment_version(leaf)


def gradient_edges(value: Any, where: str) -> list[GradientEdge]:
    """Where the gradients of the value's tensors enter the graph that made them. `where` names the stage in errors."""
    return [get_gradient_edge(tensor) for tensor in _wanting_gradient(value, where)]


def _wanting_gradient(value: Any, where: str) -> list[torch.Tensor]:
    tensors = [value] if isinstance(value, torch.Tensor) else flatten(value, where)[0]
    return [tensor for tensor in tensors if tensor.requires_grad]


def refuse_modes_without_gradients() -> None:
    """Raises PipelineError where autograd is off, for what trains."""
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise PipelineError(
            f"step runs under torch.{mode}(), but it makes gradients; leave that out, or use evaluate or forward"
        )


def loss_of(loss_fn: Callable[[Any, Any], torch.Tensor], output: Any, target: Any) -> torch.Tensor:
    """What `loss_fn` returns. Raises PipelineError unless that is a loss, with a gradient if the output has one."""
    loss = loss_fn(output, target)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise PipelineError(f"loss_fn returned {got}; it must return a tensor with one element, the mean loss")
    if loss.is_complex():
        raise PipelineError("loss_fn returned a complex tensor; it must return a real one, the mean loss")
    if not loss.requires_grad and any(t.requires_grad for t in tensors_anywhere(output)):
        raise PipelineError(
            "loss_fn returned a loss without gradient for an output that has one; leave out detach(), item() and "
            "no_grad() in it, or use evaluate"
        )
    return loss


def take_loss(
    kept: Kept, loss_fn: Callable[[Any, Any], torch.Tensor], output: Any, target: Any, weight: float
) -> float:
    """The micro-batch's own loss; its share `weight` of the mean is what the backward starts from."""
    loss = loss_of(loss_fn, output, target)
    if loss.requires_grad:
        kept.loss = get_gradient_edge(loss), torch.full_like(loss, weight, requires_grad=False)
    return math.nan if loss.is_meta else loss.item()  # a model without numbers has a loss without one


def backward(kept: Kept, received: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Accumulate the stage's parameter gradients; return the gradients for each incoming edge.

    `received`: for each outgoing edge the gradients of its tensors that require one.
    """
    roots, gradients = _roots(kept, received)
    if roots:
        run_backward(roots, gradients)
    return [[torch.zeros_like(t) if t.grad is None else t.grad for t in leaves] for leaves in kept.leaves]


def backward_inputs(kept: Kept, received: list[list[torch.Tensor]]) -> tuple[list[list[torch.Tensor]], WeightWork]:
    """As `backward`, but the parameters' gradients are left for later."""
    assert kept.entries is not None
    found, work = input_gradients(*_roots(kept, received), [entry for entries in kept.entries for entry in entries])
    gradients = iter(found)
    return [[_or_zeros(next(gradients), entry) for entry in entries] for entries in kept.entries], work


def _roots(kept: Kept, received: list[list[torch.Tensor]]) -> tuple[list[GradientEdge], list[torch.Tensor | None]]:
    roots = [edge for edges in kept.outputs for edge in edges]
    gradients: list[torch.Tensor | None] = [gradient for edge in received for gradient in edge]
    if kept.loss is not None:
        edge, gradient = kept.loss
        roots.append(edge)
        gradients.append(gradient)
    return roots, gradients


def _or_zeros(gradient: torch.Tensor | None, edge: GradientEdge) -> torch.Tensor:
    return zeros_at(edge) if gradient is None else gradient


def warm_up() -> None:
    """Let torch load what the first backward from a gradient edge needs: 0.4 s, no part of the first step's time."""
    x = torch.zeros((), requires_grad=True)
    torch.autograd.backward([get_gradient_edge(x * 1)], [torch.zeros(())])


def hand_over(value: Any) -> Any:
    """A value for a stage on the same rank: the same memory, cut off from the graph that made it."""
    return over_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), value)


def over_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The value with each of its tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: over_tensors(change, item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(over_tensors(change, item) for item in value)
    return value
