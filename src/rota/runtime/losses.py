"""What `loss_fn` returns for a micro-batch: a mean, (sum, count), or a dict with one of them and metrics.

It must not have weights of its own: they would belong to no stage.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from rota.core.errors import PipelineError
from rota.models import Stages
from rota.runtime.device.numbers import number_in, read_numbers
from rota.runtime.device.protocol import Device, Number
from rota.runtime.messages import tensors_in
from rota.torch_internals import accumulates_gradient

#: `loss_fn(output, target)`, or `loss_fn(output)` for a model that returns its own loss.
LossFn: TypeAlias = Callable[..., Any]

_FORMS = "a mean loss, (sum, count), or a dict with one of them as 'loss' and metrics beside it"


@dataclass(slots=True)
class Weighed:
    """A mean, or a sum with its count; for an added loss, a mean and the part of the loss's count that it is for."""

    value: Number
    count: Number | None = None


@dataclass(slots=True)
class MicrobatchLoss:
    """The loss of a micro-batch as `loss_fn` returned it, and its metrics."""

    value: Number
    count: Number | None
    metrics: dict[str, Weighed]


def means_of(losses: Mapping[int, MicrobatchLoss], device: Device) -> dict[int, float]:
    """Each micro-batch's own mean loss; nan if its count is 0. Waits for the device."""
    parts = [(loss.value, 1.0 if loss.count is None else loss.count) for loss in losses.values()]
    numbers = read_numbers([number for part in parts for number in part], device)
    return dict(zip(losses, map(ratio, numbers[::2], numbers[1::2]), strict=True))


def needs_target(loss_fn: LossFn) -> bool:
    """Whether `loss_fn` can take a target; if it takes the output alone, the output has the loss."""
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):  # some functions written in C have no signature
        return True
    kinds = [parameter.kind for parameter in parameters]
    num_by_position = sum(kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
    return num_by_position != 1 or Parameter.VAR_POSITIONAL in kinds


def loss_of(
    loss_fn: LossFn, output: Any, target: Any, device: Device, takes_target: bool | None = None
) -> tuple[torch.Tensor, MicrobatchLoss]:
    """What the backward starts from, and its numbers. Does not wait for the device.

    `takes_target`: what `needs_target` says; None: ask it. Raises PipelineError if `loss_fn` returns something else, or
    a loss without gradient for an output that has one.
    """
    if takes_target is None:
        takes_target = needs_target(loss_fn)
    returned = loss_fn(output, target) if takes_target else loss_fn(output)
    metrics: dict[str, Weighed] = {}
    # In this order, as asking whether a tensor is a Mapping takes long.
    if not isinstance(returned, torch.Tensor) and isinstance(returned, Mapping):
        if "loss" not in returned:
            raise PipelineError(f"loss_fn returned a dict with {[*returned]}; add 'loss' to it: {_FORMS}")
        metrics = {str(name): _metric(name, value, device) for name, value in returned.items() if name != "loss"}
        returned = returned["loss"]
    count = None
    if isinstance(returned, tuple):
        if len(returned) != 2:
            raise PipelineError(f"loss_fn returned a tuple of {len(returned)}; it must return {_FORMS}")
        returned, count = returned[0], _number("the count that loss_fn returned", returned[1], device)
        if isinstance(count, float) and not 0 <= count < math.inf:
            raise PipelineError(f"loss_fn returned the count {count:g}; give a finite number of 0 or more")
    if not isinstance(returned, torch.Tensor) or returned.numel() != 1:
        got = f"shape {list(returned.shape)}" if isinstance(returned, torch.Tensor) else type(returned).__name__
        raise PipelineError(
            f"loss_fn returned {got}; it must return a tensor with one element, the mean loss: {_FORMS}"
        )
    if returned.is_complex():
        raise PipelineError("loss_fn returned a complex tensor; it must return a real one, the mean loss")
    if not returned.requires_grad and any(tensor.requires_grad for tensor in tensors_in(output)):
        raise PipelineError(
            "loss_fn returned a loss without gradient for an output that has one; leave out detach(), item() and "
            "no_grad() in it, or use evaluate"
        )
    return returned, MicrobatchLoss(number_in(returned, device), count, metrics)


def _number(what: str, value: Any, device: Device) -> Number:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return number_in(value, device)
    if isinstance(value, (bool, int, float)):
        return float(value)
    got = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise PipelineError(f"{what} is {got}; give a number, or a tensor with one element")


def _metric(name: Any, value: Any, device: Device) -> Weighed:
    what = f"the metric {name!r} that loss_fn returned"
    if isinstance(value, tuple) and len(value) == 2:
        return Weighed(_number(what, value[0], device), _number(f"the count of {what}", value[1], device))
    return Weighed(_number(what, value, device))


def ratio(total: float, count: float) -> float:
    """Total / count; nan if the count is 0."""
    return total / count if count else math.nan


# --- weights of a loss_fn, which would belong to no stage -------------------------------------------------------------


_REMEDY = (
    "make it the model's last module, which takes the target as an input and returns the loss, and give "
    "loss_fn=lambda loss: loss"
)


def refuse_weights(loss_fn: LossFn, stages: Stages) -> None:
    """Raises PipelineError if `loss_fn` is a module with weights that train and that no stage has."""
    if not isinstance(loss_fn, nn.Module):
        return
    of_stages = {parameter for module in stages.modules for parameter in module.parameters()}
    own = [name for name, weight in loss_fn.named_parameters() if weight.requires_grad and weight not in of_stages]
    if own:
        more = f" and {len(own) - 1} more" if len(own) > 1 else ""
        raise PipelineError(
            f"loss_fn is a {type(loss_fn).__name__} with weights of its own ({own[0]!r}{more}), which belong to no "
            f"stage, so pipeline.parameters() lacks them, and nothing clips, reduces or saves them; {_REMEDY}, or "
            f"freeze them by requires_grad_(False)"
        )


def ends_of(output: Any, target: Any) -> set[Node]:
    """Where the graph of a loss of these ends: before `loss_fn` is called, as it may write into the output."""
    tensors = (*tensors_in(output), *tensors_in(target))
    return {get_gradient_edge(tensor).node for tensor in tensors if tensor.requires_grad}


def refuse_weights_in(loss: torch.Tensor, ends: set[Node], stages: Stages, stage: int) -> None:
    """Raises PipelineError if a loss with these `ends`, of the output of `stage`, has weights that it lacks."""
    if not ends or not loss.requires_grad:  # an output of unknown type: its graph is not told from the loss's
        return
    of_stage = {*stages[stage].parameters()}
    for leaf in _leaves(loss, ends):
        if leaf not in of_stage:
            places = (
                (s, name)
                for s, module in enumerate(stages.modules)
                for name, parameter in module.named_parameters()
                if parameter is leaf
            )
            where = next((f"{name!r} of stage {s}" for s, name in places), "")
            where = where or f"a weight of shape {list(leaf.shape)} that belongs to no stage"
            raise PipelineError(
                f"loss_fn uses {where}, which stage {stage}, the last one, does not have, so its gradient would be "
                f"lost or not be reduced; {_REMEDY}, or use it under torch.no_grad()"
            )


def _leaves(loss: torch.Tensor, ends: Iterable[Node]) -> Iterator[torch.Tensor]:
    """The leaves to which the loss's graph leads, other than through `ends`."""
    stack: list[Any] = [get_gradient_edge(loss).node]
    seen = {*ends}
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if accumulates_gradient(node):
            yield node.variable
        stack += [following for following, _ in node.next_functions if following is not None]
