"""The norm of all ranks' gradients, for any norm type, and gradients scaled to a maximum norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from numbers import Real

import torch
import torch.distributed as dist
from torch import nn

from rota.errors import PipelineError
from rota.runtime.reducing.wrapped_stages import is_sharded
from rota.runtime.transport import collective


def clip(
    parameters: Iterable[nn.Parameter],
    counted: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    share: Callable[[float], list[float]],
) -> float:
    """Scale the gradients of `parameters` as `torch.nn.utils.clip_grad_norm_` does; returns the norm before.

    The norm is over the `counted` parameters of all processes; `share` gathers a number from each. Collective.
    """
    for name, number in (("max_norm", max_norm), ("norm_type", norm_type)):
        if not isinstance(number, Real) or isinstance(number, bool):
            raise PipelineError(f"{name} is {number!r}; give a number")
    if not norm_type > 0:
        raise PipelineError(f"norm_type is {norm_type}; give a number above 0, or inf")
    norm = total_norm([local(p.grad) for p in counted if p.grad is not None], float(norm_type), share)
    if error_if_nonfinite and not math.isfinite(norm):
        raise PipelineError(
            f"the norm of the gradients is {norm}, so they cannot be clipped; leave this step out, or clip with "
            f"error_if_nonfinite=False"
        )
    scale = max_norm / (norm + 1e-6)
    if not scale >= 1:  # true for nan, too, which then gets into all gradients
        for parameter in parameters:
            if parameter.grad is not None:
                local(parameter.grad).mul_(scale)
    return norm


def total_norm(gradients: list[torch.Tensor], norm_type: float, share: Callable[[float], list[float]]) -> float:
    """The norm of all processes' `gradients`, added up in float64. Collective."""
    norms = [_norm(gradient, norm_type) for gradient in gradients if gradient.numel()]
    mine = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64)
    if math.isinf(norm_type):
        return float(torch.tensor(share(float(mine.max())), dtype=torch.float64).max())  # nan where one is nan
    total = torch.tensor(share(float((mine**norm_type).sum())), dtype=torch.float64).sum()
    return float(total ** (1 / norm_type))


def _norm(gradient: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The norm of one gradient as a float64 scalar; of a complex one, the norm of its absolute values."""
    dtype = torch.complex128 if gradient.is_complex() else torch.float64
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, norm_type, dtype=dtype)
    return norm


def all_gather_number(number: float, group: dist.ProcessGroup) -> list[float]:
    """The `number` of each of the group's processes. Collective."""
    gathered = [torch.empty(1, dtype=torch.float64) for _ in range(group.size())]
    with collective("adding up the gradients' norm"):
        dist.all_gather(gathered, torch.tensor([number], dtype=torch.float64), group=group)
    return [float(each) for each in gathered]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor in this process: a shard of a DTensor, else all of it."""
    own: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return own.detach()
