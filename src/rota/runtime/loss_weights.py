"""Refuses a `loss_fn` that has weights, or buffers that it changes, of its own: they belong to no stage.

Pipeline(…)     a module with weights that train
first loss      whatever the graph from the loss reaches past the output: a closure's weights, another stage's
buffers of the modules in a method, a partial or a closure, before and after
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any, final

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from rota.core.errors import PipelineError
from rota.models import Stages
from rota.runtime.losses import LossFn
from rota.runtime.messages import tensors_in
from rota.torch_internals import accumulates_gradient

_REMEDY = (
    "make it the model's last module, which takes the target as an input and returns the loss, and give "
    "loss_fn=lambda loss: loss"
)


def refuse_weights(loss_fn: LossFn, stages: Stages) -> None:
    """Raises PipelineError if `loss_fn` is a module with weights that train and that no stage has."""
    if not isinstance(loss_fn, nn.Module):
        return
    of_stages = {parameter for module in stages.modules for parameter in module.parameters()}
    own = [name for name, each in loss_fn.named_parameters() if each.requires_grad and each not in of_stages]
    if own:
        more = f" and {len(own) - 1} more" if len(own) > 1 else ""
        raise PipelineError(
            f"loss_fn is a {type(loss_fn).__name__} with weights of its own ({own[0]!r}{more}), which belong to no "
            f"stage, so pipeline.parameters() lacks them, and nothing clips, reduces or saves them; {_REMEDY}, or "
            f"freeze them by requires_grad_(False)"
        )


@final
class FirstLoss:
    """The first call of `loss_fn` with gradients; made before it, for the output of stage `stage`."""

    def __init__(self, loss_fn: LossFn, output: Any, target: Any, stages: Stages, stage: int) -> None:
        self._stages, self._last = stages, stage
        wanting = [tensor for tensor in (*tensors_in(output), *tensors_in(target)) if tensor.requires_grad]
        #: Where the loss's own graph ends: now, as `loss_fn` may write into the output.
        self._ends = {get_gradient_edge(tensor).node for tensor in wanting}
        of_stages = {buffer for module in stages.modules for buffer in module.buffers()}
        named = ((name, each) for module in _modules_in(loss_fn) for name, each in module.named_buffers())
        self._buffers = [
            (name, each, each.clone()) for name, each in named if each not in of_stages and not each.is_meta
        ]

    def refuse(self, loss: torch.Tensor) -> None:
        """Raises PipelineError if the loss has trained weights, or has changed buffers, that its stage lacks."""
        for name, buffer, before in self._buffers:
            if not torch.equal(buffer, before):
                raise PipelineError(
                    f"loss_fn changes the buffer {name!r} of a module that belongs to no stage, so it is not saved, "
                    f"and differs between replicas; {_REMEDY}, or put that module in eval()"
                )
        if not self._ends or not loss.requires_grad:  # an output of unknown type: its graph is not told from the loss's
            return
        of_stage = {*self._stages[self._last].parameters()}
        for leaf in _leaves(loss, self._ends):
            if leaf not in of_stage:
                raise PipelineError(
                    f"loss_fn uses {self._describe(leaf)}, which stage {self._last}, the last one, does not have, so "
                    f"its gradient would be lost or not be reduced; {_REMEDY}, or use it under torch.no_grad()"
                )

    def _describe(self, leaf: torch.Tensor) -> str:
        for stage, module in enumerate(self._stages.modules):
            for name, parameter in module.named_parameters():
                if parameter is leaf:
                    return f"{name!r} of stage {stage}"
        return f"a weight of shape {list(leaf.shape)} that belongs to no stage"


def _leaves(loss: torch.Tensor, ends: Iterable[Node]) -> Iterator[torch.Tensor]:
    """The leaves to which the loss's graph leads, other than through `ends`."""
    stack, seen = [get_gradient_edge(loss).node], {*ends}
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if accumulates_gradient(node):
            yield node.variable  # type: ignore[attr-defined]
        stack += [each for each, _ in node.next_functions if each is not None]


def _modules_in(function: Any) -> Iterator[nn.Module]:
    """The modules that a function calls as itself, its method's object, its partial's arguments or its closure."""
    stack: list[Any] = [function]
    seen: set[int] = set()
    while stack:
        each = stack.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, nn.Module):
            yield each
        elif isinstance(each, partial):
            stack += [each.func, *each.args, *each.keywords.values()]
        elif isinstance(each, MethodType):
            stack += [each.__self__, each.__func__]
        elif isinstance(each, FunctionType):
            for cell in each.__closure__ or ():
                with suppress(ValueError):  # an empty one
                    stack.append(cell.cell_contents)
