"""Clipping by the norm of all pipeline stages together."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from rota.compat.torchdistpackage.topology import tpc
from rota.runtime.norms import all_gather_number, clip


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[Any],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """As `torch.nn.utils.clip_grad_norm_` of the whole model; the norm before, on every stage. Collective.

    Each stage gives its own `parameters`, none if it has none; one given twice counts once. Raises PipelineError.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    mine: list[Any] = [*dict.fromkeys(given)]
    share = partial(all_gather_number, group=tpc.get_group("pipe"))
    norm = clip(mine, mine, float(max_norm), float(norm_type), error_if_nonfinite, share)
    return torch.tensor(norm, dtype=torch.float64)
