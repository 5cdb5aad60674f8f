"""Frees the weights of stages that a process does not run."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from rota.models.stages import Stages


@torch.no_grad()
def keep_local(stages: Stages, local: Iterable[int]) -> None:
    """Put weights and buffers that no `local` stage uses on the meta device, where they need no memory.

    Shapes, names and ties stay as they are. It changes the modules in place, so the model that was cut too.
    """
    kept = {tensor for stage in local for tensor in _tensors(stages[stage])}
    shapes: dict[torch.Tensor, torch.Tensor] = {}
    for module in (*stages.modules, *([stages.unsplit] if isinstance(stages.unsplit, nn.Module) else [])):
        for inner in module.modules():
            held: dict[str, torch.Tensor | None]
            for held in (inner._parameters, inner._buffers):  # type: ignore[assignment]
                for name, tensor in held.items():
                    if tensor is not None and tensor not in kept:
                        held[name] = shapes.setdefault(tensor, _shape_of(tensor))
        kept.update(shapes.values())


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    meta = torch.empty_like(tensor, device="meta")
    return nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
