"""fp16: autocast around forwards, and a loss scale that all ranks lower together if one of them overflows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Literal, final

import torch
from torch import nn

from rota.core.errors import PipelineError


@final
class MixedPrecision:
    """Weights, gradients and optimizer stay in float32, forwards compute in float16. Does nothing if it is off."""

    def __init__(self, enabled: bool) -> None:
        self.enabled: Final = enabled
        self.scaler: torch.amp.GradScaler | None = None
        self._fixed: float | None = None
        self._least = 0.0

    def set_scale(self, loss_scale: float | Literal["dynamic"], init_loss_scale: float, min_loss_scale: float) -> None:
        """Set the loss scale: fixed, or dynamic from `init_loss_scale` on, never below `min_loss_scale`."""
        if not self.enabled:
            return
        if isinstance(loss_scale, str) and loss_scale != "dynamic":
            raise PipelineError(f"loss_scale is {loss_scale!r}; give a number or 'dynamic'")
        self._fixed = None if isinstance(loss_scale, str) else float(loss_scale)
        self._least = min_loss_scale
        self.scaler = torch.amp.GradScaler("cpu", init_scale=self._fixed or init_loss_scale)

    @property
    def scale(self) -> float:
        """The factor by which the loss is multiplied now; 1.0 before `set_scale`."""
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def forwards(self) -> AbstractContextManager[object]:
        """A context for steps, which sets the dtype of forwards."""
        return torch.autocast("cpu", torch.float16) if self.enabled else nullcontext()

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Multiply the gradients that are in `.grad` already by the factor of this step's gradients."""
        if self.enabled and self.scaler is None:
            raise PipelineError("with fp16, call set_optimizer before step (None on a rank without parameters)")
        for parameter in parameters if self.scaler is not None else ():
            if parameter.grad is not None:
                parameter.grad.mul_(self.scale)

    def unscale(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Divide the gradients of the optimizer's parameters by the scale."""
        if self.scaler is not None and optimizer is not None:
            self.scaler.unscale_(optimizer)

    def finish(self, parameters: Iterable[nn.Parameter], norm: float) -> bool:
        """Whether there was an overflow; if so, gradients are removed, so that the optimizer's step does nothing."""
        if self.scaler is None:
            return False
        overflow = not math.isfinite(norm)
        for parameter in parameters if overflow else ():
            parameter.grad = None
        self.scaler.update(self._fixed)
        if self.scale < self._least:
            self.scaler.update(self._least)
        return overflow
