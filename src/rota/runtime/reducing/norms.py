"""The norm of all ranks' gradients, for any norm type, and gradients scaled to a maximum norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rota.core.errors import PipelineError
from rota.runtime.device.protocol import Number
from rota.runtime.reducing.sharded_stages import is_sharded
from rota.runtime.transport import collective
from rota.torch_internals import multiply_each, norms_of_each


def clip(
    parameters: Iterable[nn.Parameter],
    counted: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    share: Callable[[Number], torch.Tensor],
) -> torch.Tensor:
    """Scale the gradients of `parameters` as `torch.nn.utils.clip_grad_norm_` does; returns the norm before.

    The norm is over the `counted` parameters of all processes; `share` gathers a number from each, as float64 where
    the gradients are. Collective. Only `error_if_nonfinite` waits for a queued device.
    """
    for name, number in (("max_norm", max_norm), ("norm_type", norm_type)):
        if not isinstance(number, Real) or isinstance(number, bool):
            raise PipelineError(f"{name} is {number!r}; give a number")
    if not norm_type > 0:
        raise PipelineError(f"norm_type is {norm_type}; give a number above 0, or inf")
    max_norm = float(max_norm)
    norm = total_norm([local(p.grad) for p in counted if p.grad is not None], float(norm_type), share)
    if error_if_nonfinite and not math.isfinite(norm):
        raise PipelineError(
            f"the norm of the gradients is {float(norm)}, so they cannot be clipped; leave this step out, or clip with "
            f"error_if_nonfinite=False"
        )
    scale: Number
    if norm.is_cpu:
        scale = max_norm / (norm.item() + 1e-6)
        if scale >= 1:  # false for nan, too, which then gets into all gradients
            return norm
    else:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    multiply_each([local(p.grad) for p in parameters if p.grad is not None], scale)
    return norm


def total_norm(
    gradients: list[torch.Tensor], norm_type: float, share: Callable[[Number], torch.Tensor]
) -> torch.Tensor:
    """The norm of all processes' `gradients`, added up in float64. Collective."""
    gradients = [g for g in gradients if g.numel()]
    norms = norms_of_each([g for g in gradients if not g.is_complex()], norm_type, torch.float64)
    norms += norms_of_each([g for g in gradients if g.is_complex()], norm_type, torch.complex128)  # of absolute values
    if math.isinf(norm_type):
        return share(torch.stack(norms).max() if norms else 0.0).max()  # nan where one is nan
    return share((torch.stack(norms) ** norm_type).sum() if norms else 0.0).sum() ** (1 / norm_type)


def all_gather_number(number: Number, group: dist.ProcessGroup) -> torch.Tensor:
    """The `number` of each of the group's processes, on the CPU. Collective."""
    gathered = [torch.empty(1, dtype=torch.float64, device="cpu") for _ in range(group.size())]
    with collective("adding up the gradients' norm"):
        dist.all_gather(gathered, torch.tensor([float(number)], dtype=torch.float64, device="cpu"), group=group)
    return torch.cat(gathered)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor in this process: a shard of a DTensor, else all of it."""
    sharded: Any = tensor
    own: torch.Tensor = sharded.to_local() if is_sharded(tensor) else tensor
    return own.detach()
