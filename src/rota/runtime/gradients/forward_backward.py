"""Forward and backward of one stage for one micro-batch, cut off at its boundaries.

    received value ──detach──▶ leaves ──▶ stage ──▶ outputs ──detach──▶ sent value
    sent gradients ◀────────── leaf.grad ◀─ autograd ◀─ gradient edges ◀── received gradients

Between the two only what autograd saved is kept: outputs are held by their gradient edges, not their data. Where the
backward is split (see `split_backward`), inputs are held by their gradient edges as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rota.core.errors import PipelineError
from rota.models import Stages
from rota.models.sequence_chunks import Chunk
from rota.runtime.device.protocol import Number
from rota.runtime.gradients.split_backward import Gradients, WeightWork, enter, input_gradients
from rota.runtime.messages import flatten, over_tensors, tensors_in
from rota.torch_internals import count_writes, run_backward, writable


@dataclass(slots=True)
class Kept:
    """What a forward leaves for its backward.

    `leaves` by incoming edge, `outputs` (gradient edges) by outgoing edge, and the losses, each with the gradient that
    the backward starts from. A split backward has `entries` instead of `leaves`. `passed_on`: what later chunks read,
    each with its leaf; `earlier`: where gradients of what earlier chunks passed on come in, in a split backward.
    """

    leaves: list[list[torch.Tensor]]
    outputs: list[list[GradientEdge]]
    entries: list[list[GradientEdge]] | None = None
    losses: list[tuple[GradientEdge, torch.Tensor]] = field(default_factory=list)
    passed_on: list[tuple[GradientEdge, torch.Tensor]] = field(default_factory=list)
    earlier: list[tuple[GradientEdge, torch.Tensor]] = field(default_factory=list)


@final
class StageForward:
    """The forward of one stage. `split`: for `backward_inputs` rather than `backward`."""

    def __init__(self, stages: Stages, stage: int, *, split: bool = False) -> None:
        self._stages, self._stage, self._split = stages, stage, split
        self._module = stages[stage]
        self._where = f"stage {stage} ({type(self._module).__name__})"
        self._outgoing = stages.outgoing(stage)
        self._reads_inputs = bool(stages.inputs[stage])

    def __call__(
        self,
        received: list[Any],
        batch: Any,
        *,
        buffers: Mapping[str, torch.Tensor] | None = None,
        chunk: Chunk | None = None,
    ) -> tuple[Any, list[Any], Kept]:
        """Run it for one micro-batch; returns the output, the value for each outgoing edge, and what to keep.

        `received`: the values of the incoming edges; their tensors that require a gradient must be leaves, and the
        stage may write into them. `buffers` stand in for the module's own of these names. `chunk`: what it reads of
        earlier chunks of its sample.
        """
        split, module = self._split, self._module
        entered = [_entered(value, enter if split else writable) for value in received]
        # The edges now: the stage may write into the tensors, which changes where their gradients go.
        entries = [[*map(get_gradient_edge, stand_ins)] for _, stand_ins, _ in entered] if split else None
        kept = Kept([] if split else [leaves for leaves, _, _ in entered], [], entries)
        arguments = [value for *_, value in entered]
        if self._reads_inputs:
            arguments += self._stages.pick_inputs(self._stage, batch)
        if chunk is not None and split:
            chunk.enter = partial(_enter_earlier, kept)
        try:
            with nullcontext() if chunk is None else chunk:
                output = (
                    torch.func.functional_call(module, dict(buffers), (*arguments,)) if buffers else module(*arguments)
                )
        except TypeError as error:
            self._stages.explain_arguments(error, self._stage, arguments)
            raise
        if not split:
            for leaves, stand_ins, _ in entered:
                count_writes(leaves, stand_ins)
        values = [output if edge.key is None else edge.take(output) for edge in self._outgoing]
        kept.outputs = [gradient_edges(value, self._where) for value in values]
        return output, values, kept


def _enter_earlier(kept: Kept, leaf: torch.Tensor) -> torch.Tensor:
    """What stands in for a leaf of an earlier chunk in a forward whose backward is split."""
    if not leaf.requires_grad:
        return leaf
    entered = enter(leaf)
    kept.earlier.append((get_gradient_edge(entered), leaf))
    return entered


def pass_on(kept: Kept, values: Iterable[torch.Tensor], leaves: Iterable[torch.Tensor]) -> None:
    """Let the backward start also from what the backwards of later chunks add to the leaves."""
    pairs = zip(values, leaves, strict=True)
    kept.passed_on = [(get_gradient_edge(value), leaf) for value, leaf in pairs if value.requires_grad]


def _entered(
    value: Any, enter_as: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor], Any]:
    """The tensors of a received value that require a gradient, what stands in for them, and the value with that."""
    if isinstance(value, torch.Tensor):  # as most are
        if not value.requires_grad:
            return [], [], value
        entered = enter_as(value)
        return [value], [entered], entered
    leaves = [tensor for tensor in tensors_in(value) if tensor.requires_grad]
    stand_ins = [*map(enter_as, leaves)]
    of_leaves = iter(stand_ins)
    return leaves, stand_ins, over_tensors(lambda tensor: next(of_leaves) if tensor.requires_grad else tensor, value)


def gradient_edges(value: Any, where: str) -> list[GradientEdge]:
    """Where the gradients of the value's tensors enter the graph that made them. `where` names the stage in errors."""
    tensors = [value] if isinstance(value, torch.Tensor) else flatten(value, where)[0]
    return [get_gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]


def refuse_modes_without_gradients() -> None:
    """Raises PipelineError where autograd is off, for what trains."""
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise PipelineError(
            f"step runs under torch.{mode}(), but it makes gradients; leave that out, or use evaluate or forward"
        )


def keep_loss(kept: Kept, loss: torch.Tensor, weight: Number) -> None:
    """Let the backward start from `loss` too, times `weight`; not if it has no gradient."""
    if loss.requires_grad:
        if isinstance(weight, float):
            gradient = torch.full_like(loss, weight, requires_grad=False)
        else:
            gradient = weight.to(loss.device, loss.dtype).reshape(loss.shape)
        kept.losses.append((get_gradient_edge(loss), gradient))


def backward(kept: Kept, received: Sequence[Gradients]) -> list[list[torch.Tensor | None]]:
    """Accumulate the stage's parameter gradients; return the gradients for each incoming edge.

    `received`: for each outgoing edge the gradients of its tensors that require one. A gradient that no path leads to
    is None, as in the unsplit model.
    """
    roots, gradients = _roots(kept, received)
    if roots:
        run_backward(roots, gradients)
    return [[leaf.grad for leaf in leaves] for leaves in kept.leaves]


def backward_inputs(kept: Kept, received: Sequence[Gradients]) -> tuple[list[list[torch.Tensor | None]], WeightWork]:
    """As `backward`, but the parameters' gradients are left for later."""
    assert kept.entries is not None
    inputs = [entry for entries in kept.entries for entry in entries] + [entry for entry, _ in kept.earlier]
    arrived, work = input_gradients(*_roots(kept, received), inputs)
    for (_, leaf), gradient in zip(kept.earlier, arrived[len(inputs) - len(kept.earlier) :], strict=True):
        if gradient is not None:
            # A copy, as the gradient is a part of one for all earlier chunks, which it would keep.
            leaf.grad = gradient.clone() if leaf.grad is None else leaf.grad.add_(gradient)
    gradients = iter(arrived)
    return [[next(gradients) for _ in entries] for entries in kept.entries], work


def _roots(kept: Kept, received: Sequence[Gradients]) -> tuple[list[GradientEdge], list[torch.Tensor | None]]:
    roots: list[GradientEdge] = []
    gradients: list[torch.Tensor | None] = []
    for edges, arrived in zip(kept.outputs, received, strict=True):
        for edge, gradient in zip(edges, arrived, strict=True):
            if gradient is not None:
                roots.append(edge)
                gradients.append(gradient)
    for edge, gradient in kept.losses:
        roots.append(edge)
        gradients.append(gradient)
    for edge, leaf in kept.passed_on:
        if leaf.grad is not None:
            roots.append(edge)
            gradients.append(leaf.grad)
    return roots, gradients
