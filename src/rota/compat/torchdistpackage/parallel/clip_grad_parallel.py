"""Gradient clipping by the norm over all pipeline stages."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from rota.compat.torchdistpackage.topology import tpc
from rota.runtime.reducing.norms import all_gather_number, clip


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[Any], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Clip gradients as `torch.nn.utils.clip_grad_norm_` does for the whole model. Collective.

    Args:
        parameters: This stage's parameters, possibly none. A parameter that is given twice counts once.
        max_norm: The norm above which gradients are scaled.
        norm_type: The p of the p-norm; `float("inf")` for the maximum norm.
        error_if_nonfinite: Whether to raise PipelineError if the norm is not finite.

    Returns:
        The norm before clipping, float64, on every stage.
    """
    unique: list[Any] = [*dict.fromkeys([parameters] if isinstance(parameters, torch.Tensor) else parameters)]
    share = partial(all_gather_number, group=tpc.get_group("pipe"))
    return clip(unique, unique, float(max_norm), float(norm_type), error_if_nonfinite, share)
