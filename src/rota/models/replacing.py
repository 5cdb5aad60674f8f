"""Replacing a tensor's content while it stays the same object, so that ties and references to it remain."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import nn

from rota.core.errors import PipelineError


def replace(tensor: torch.Tensor, other: torch.Tensor, holders: Iterable[nn.Module] = ()) -> None:
    """Give `tensor` the content of `other`; it stays the same object.

    If that is impossible because of a weak reference to it, such as an LSTM's to its weights, `other` takes its
    place in `holders`.
    """
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(other, tensor.requires_grad)
    vars(other).update(vars(tensor))
    if weakref.getweakrefs(tensor):
        for module in holders:
            for name in [*module._parameters, *module._buffers]:
                if getattr(module, name) is tensor:
                    setattr(module, name, other)
        return
    try:
        torch.utils.swap_tensors(tensor, other)
    except RuntimeError as error:
        raise PipelineError(
            f"a weight of shape {list(tensor.shape)} is in use ({error}): materialize or move the stages before "
            "anything else refers to their weights (an optimizer, DDP, a graph of a forward)"
        ) from None


def move(tensor: torch.Tensor, device: torch.device, holders: Iterable[nn.Module] = ()) -> None:
    """Move a tensor and its gradient to `device`; see `replace`."""
    if tensor.device == device:
        return
    gradient, tensor.grad = tensor.grad, None
    moved = tensor.detach().to(device)
    with suppress(RuntimeError):  # tensors of another kind
        tensor.data = moved  # as Module.to does: unlike a swap, it works whoever refers to the tensor
    if tensor.device != moved.device:
        replace(tensor, moved, holders)
    if gradient is not None:
        tensor.grad = gradient.to(device)
