"""What `loss_fn` returns for a micro-batch: a mean, (sum, count), or a dict with one of them and metrics."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, TypeAlias

import torch

from rota.core.errors import PipelineError
from rota.runtime.device.numbers import number_in, read_numbers
from rota.runtime.device.protocol import Device, Number
from rota.runtime.messages import tensors_in

#: `loss_fn(output, target)`, or `loss_fn(output)` for a model that returns its own loss.
LossFn: TypeAlias = Callable[..., Any]

_FORMS = "a mean loss, (sum, count), or a dict with one of them as 'loss' and metrics beside it"


@dataclass(frozen=True, slots=True)
class Weighed:
    """A mean, or a sum with its count; for an added loss, a mean and the part of the loss's count that it is for."""

    value: Number
    count: Number | None = None


@dataclass(frozen=True, slots=True)
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
    by_position = [
        one for one in parameters if one.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]
    return len(by_position) != 1 or any(one.kind is Parameter.VAR_POSITIONAL for one in parameters)


def loss_of(
    loss_fn: LossFn, output: Any, target: Any, device: Device, takes_target: bool | None = None
) -> tuple[torch.Tensor, MicrobatchLoss]:
    """What the backward starts from, and its numbers. Does not wait for the device.

    `takes_target`: what `needs_target` says; None: ask it.

    Raises:
        PipelineError: `loss_fn` returns something else, or a loss without gradient for an output that has one.
    """
    if takes_target is None:
        takes_target = needs_target(loss_fn)
    returned = loss_fn(output, target) if takes_target else loss_fn(output)
    metrics: dict[str, Weighed] = {}
    if isinstance(returned, Mapping):
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
