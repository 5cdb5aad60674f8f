"""Forward and backward of one stage for one micro-batch, cut off at its boundaries.

    received value ──detach──▶ leaves ──▶ stage ──▶ outputs ──detach──▶ sent value
    sent gradients ◀────────── leaf.grad ◀─ autograd ◀─ gradient edges ◀── received gradients

Between the two only what autograd saved is kept: outputs are held by their gradient edges, not their data. Where the
backward is split (see `split_backward`), inputs are held by their gradient edges as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rota.core.errors import PipelineError
from rota.models import Stages
from rota.models.sequence_chunks import Chunk
from rota.runtime.device.protocol import Number
from rota.runtime.gradients.split_backward import Gradients, Split, WeightWork, enter, input_gradients
from rota.runtime.messages import flatten, over_tensors, tensors_in
from rota.torch_internals import run_backward, versions_of, writable


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
    losses: tuple[tuple[GradientEdge, torch.Tensor], ...] = ()
    passed_on: Sequence[tuple[GradientEdge, torch.Tensor]] = ()
    earlier: list[tuple[GradientEdge, torch.Tensor]] | None = None


_NO_CHUNK = nullcontext()


@final
class StageForward:
    """The forward of one stage. `split`: for `backward_inputs` rather than `backward`.

    While it `learns`, it finds out whether the stage writes into what it receives. A stage that does not is given the
    leaves themselves from then on: autograd refuses a write into them, and `explain` says why.
    """

    def __init__(self, stages: Stages, stage: int, *, split: bool = False) -> None:
        self._stages, self._stage, self._split = stages, stage, split
        self._module = stages[stage]
        self._where = f"stage {stage} ({type(self._module).__name__})"
        self._outgoing = stages.outgoing(stage)
        self._reads_inputs = bool(stages.inputs[stage])
        self.learns, self._writes = True, False

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
        module, kept = self._module, Kept([], [])
        arguments, leaves = received, list[torch.Tensor]()
        if self._split:
            arguments, stand_ins = _entered(received, enter)
            # The edges now: the stage may write into the tensors, which changes where their gradients go.
            kept.entries, kept.earlier = [[*map(_edge_of, of_edge)] for of_edge in stand_ins], []
            if chunk is not None:
                chunk.enter = partial(_enter_earlier, kept.earlier)
        else:
            kept.leaves = [
                ([value] if value.requires_grad else [])
                if isinstance(value, torch.Tensor)
                else [tensor for tensor in tensors_in(value) if tensor.requires_grad]
                for value in received
            ]
            if self.learns or self._writes:
                arguments, _ = _entered(received, writable)
                leaves = [leaf for of_edge in kept.leaves for leaf in of_edge]
        versions = versions_of(leaves)
        if self._reads_inputs:
            arguments = [*arguments, *self._stages.pick_inputs(self._stage, batch)]
        try:
            with _NO_CHUNK if chunk is None else chunk:
                output = (
                    torch.func.functional_call(module, dict(buffers), (*arguments,)) if buffers else module(*arguments)
                )
        except TypeError as error:
            self._stages.explain_arguments(error, self._stage, arguments)
            raise
        self._writes |= versions != versions_of(leaves)
        if not all(leaf.requires_grad for of_edge in kept.leaves for leaf in of_edge):
            raise PipelineError(
                f"{self._where} calls requires_grad_(False) on what it receives, so no gradient would reach the stage "
                f"that made it; use detach() of it instead"
            )
        values = [output if edge.key is None else edge.take(output) for edge in self._outgoing]
        kept.outputs = [gradient_edges(value, self._where) for value in values]
        return output, values, kept

    def explain(self, error: RuntimeError, is_forward: bool) -> PipelineError | None:
        """What a refusal of autograd means; None if it has nothing to do with how the stage is run."""
        if is_forward and "leaf Variable that requires grad" in str(error) and not self.learns:
            return PipelineError(
                f"{self._where} writes into a weight, or into what it receives, and did not in the first step; write "
                f"into weights under no_grad(), and let the stage begin with an operation that is not in place, or use "
                f"Pipeline(…, dynamic_shapes=True) ({str(error).partition('.')[0]})"
            )
        if not is_forward and "backward through the graph a second time" in str(error):
            return PipelineError(
                f"{self._where} goes backward through a graph a second time: give step detached tensors if the inputs "
                f"carry the graph that made them, and keep tensor.detach() where stage {self._stage} keeps a tensor "
                f"from one micro-batch to the next ({str(error).partition('.')[0]})"
            )
        return None


def _enter_earlier(earlier: list[tuple[GradientEdge, torch.Tensor]], leaf: torch.Tensor) -> torch.Tensor:
    """What stands in for a leaf of an earlier chunk in a forward whose backward is split."""
    if not leaf.requires_grad:
        return leaf
    entered = enter(leaf)
    earlier.append((_edge_of(entered), leaf))
    return entered


def pass_on(kept: Kept, values: Iterable[torch.Tensor], leaves: Iterable[torch.Tensor]) -> None:
    """Let the backward start also from what the backwards of later chunks add to the leaves."""
    pairs = zip(values, leaves, strict=True)
    kept.passed_on = [(_edge_of(value), leaf) for value, leaf in pairs if value.requires_grad]


def _entered(
    received: list[Any], enter_as: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[list[Any], list[list[torch.Tensor]]]:
    """The received values with something that stands in for each tensor that requires a gradient, and these by edge."""
    entered, by_edge = [], []
    for value in received:
        stand_ins: list[torch.Tensor] = []

        def enter(tensor: torch.Tensor, stand_ins: list[torch.Tensor] = stand_ins) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            stand_ins.append(enter_as(tensor))
            return stand_ins[-1]

        entered.append(enter(value) if isinstance(value, torch.Tensor) else over_tensors(enter, value))
        by_edge.append(stand_ins)
    return entered, by_edge


def gradient_edges(value: Any, where: str) -> list[GradientEdge]:
    """Where the gradients of the value's tensors enter the graph that made them. `where` names the stage in errors."""
    if isinstance(value, torch.Tensor):  # as most are
        return [_edge_of(value)] if value.requires_grad else []
    return [_edge_of(tensor) for tensor in flatten(value, where)[0] if tensor.requires_grad]


def _edge_of(tensor: torch.Tensor) -> GradientEdge:
    """`get_gradient_edge` in half the time, where the tensor is no leaf."""
    node = tensor.grad_fn
    return get_gradient_edge(tensor) if node is None else GradientEdge(node, tensor.output_nr)


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
        kept.losses += ((_edge_of(loss), gradient),)


def backward(kept: Kept, received: Sequence[Gradients]) -> list[list[torch.Tensor | None]]:
    """Accumulate the stage's parameter gradients; return the gradients for each incoming edge.

    `received`: for each outgoing edge the gradients of its tensors that require one. A gradient that no path leads to
    is None, as in the unsplit model.
    """
    roots, gradients = _roots(kept, received)
    if roots:
        run_backward(roots, gradients)
    return [[leaf.grad for leaf in leaves] for leaves in kept.leaves]


def backward_inputs(
    kept: Kept, received: Sequence[Gradients], splits: list[Split] | None = None
) -> tuple[list[list[torch.Tensor | None]], WeightWork]:
    """As `backward`, but the parameters' gradients are left for later. `splits`: see `input_gradients`."""
    assert kept.entries is not None
    inputs = [entry for entries in kept.entries for entry in entries]
    if kept.earlier:
        inputs += [entry for entry, _ in kept.earlier]
    arrived, work = input_gradients(*_roots(kept, received), inputs, splits)
    gradients = iter(arrived)
    of_edges = [[next(gradients) for _ in entries] for entries in kept.entries]
    for (_, leaf), gradient in zip(kept.earlier or (), gradients, strict=True):
        if gradient is not None:
            # A copy, as the gradient is a part of one for all earlier chunks, which it would keep.
            leaf.grad = gradient.clone() if leaf.grad is None else leaf.grad.add_(gradient)
    return of_edges, work


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
