"""The first updates of a rank's weights, watched for two mistakes with which a training goes on, but wrongly.

step ──▶ gradients noted ──▶ the script clips them ──▶ optimizer.step() ──▶ the next step
                                                       ├─ on whose weights?   error if nobody's: nothing is trained
                                                       └─ by what factor?     error on all ranks if their factors differ

Factors are compared after steps 1, 2 and 3, and, as long as the script writes to gradients before the update, after
steps 4, 8, 16 and so on. A script that trains and leaves gradients alone is not watched after its third step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rota.errors import PipelineError
from rota.runtime.device.protocol import Device
from rota.runtime.reducing.norms import local, norm_of_each
from rota.runtime.reducing.wrapped_stages import is_sharded
from rota.torch_internals import version_of

_FIRST = 3  # steps after which factors are compared in any case
_ALIKE = 0.01  # how much the factors of one rank's weights may differ: bfloat16 rounds to 0.4%


class _Noted(NamedTuple):
    """The gradients of a step at its end, and their norms, one after another on the device."""

    parameters: list[nn.Parameter]
    gradients: list[torch.Tensor]
    versions: list[int]
    norms: torch.Tensor
    is_scaled: bool


@final
class FirstUpdates:
    """Watches one rank's updates, through a hook that PyTorch calls before each step of any optimizer.

    Args:
        parameters: of this rank's stages.
        device: where they are.
        compares: whether there are other ranks to compare factors with.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], device: Device, compares: bool) -> None:
        self._parameters, self._device, self._compares = [*parameters], device, compares
        self._hook: Any = None  # between the first step and `close`
        self._is_over = False
        self._num_steps = 0
        self._weight_versions: list[int] = []  # after the first step
        self._noted: _Noted | None = None
        #: Norms before and after what the script did to the gradients; None: unknown.
        self._norms: Callable[[], list[float]] | None = None
        self._is_written = False  # gradients were written to before an update
        self._is_trained = False
        self._idle = ""  # the class of an optimizer that had nothing to do

    def begin(self) -> float:
        """Before a step. Returns the factor that all gradients of the last step were multiplied by before an update.

        0.0: there is no such factor, or it is not known. May wait for the device.

        Raises:
            PipelineError: an optimizer has stepped, but it has none of the weights, and nothing has changed them.
        """
        if self._hook is None:
            return 0.0
        if self._idle and not self._is_trained:
            self._refuse_idle()
        norms, self._norms, self._noted = self._norms, None, None
        if self._is_trained and not (self._compares and (self._num_steps < _FIRST or self._is_written)):
            self.close()
        return 0.0 if norms is None else _common_factor(norms())

    def _refuse_idle(self) -> None:
        self._is_trained = self._weight_versions != self._versions_of_weights()
        if not self._is_trained:
            optimizer = self._idle
            self.close()
            raise PipelineError(
                f"{optimizer}.step() was called, but this optimizer has none of the weights of this rank's stages, and "
                f"none of its own has a gradient, so nothing is trained; make it from pipeline.parameters(), not from "
                f"another copy of the model: {optimizer}(pipeline.parameters(), …)"
            )

    def end(self, is_scaled: bool) -> None:
        """After a step that has reduced its gradients. `is_scaled`: they have the factor of a GradScaler."""
        if self._is_over:
            return
        self._num_steps += 1
        if self._num_steps == 1:
            self._weight_versions = self._versions_of_weights()
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self._before_update)
        is_power_of_2 = not self._num_steps & (self._num_steps - 1)
        if self._compares and (self._num_steps <= _FIRST or is_power_of_2):
            self._note(is_scaled)

    def _note(self, is_scaled: bool) -> None:
        parameters = [p for p in self._parameters if p.grad is not None and p.grad.layout is torch.strided]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients:
            versions = [version_of(local(gradient)) for gradient in gradients]
            self._noted = _Noted(parameters, gradients, versions, _norms_of(gradients), is_scaled)

    def forget_gradients(self) -> None:
        """The factor of this step is none of the script's."""
        self._noted = None

    def begin_again(self) -> None:
        """What comes now are the first steps."""
        self._num_steps, self._noted, self._norms = 0, None, None

    def close(self) -> None:
        """Watch no longer."""
        if self._hook is not None:
            self._hook.remove()
        self._hook, self._is_over = None, True
        self._noted, self._norms, self._weight_versions = None, None, []

    def _before_update(self, optimizer: torch.optim.Optimizer, _: object, __: object) -> None:
        """Before a step of any optimizer of this process. Does not wait for the device."""
        if (self._is_trained and self._noted is None) or torch.compiler.is_compiling():
            return
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        if not {*self._parameters}.isdisjoint(weights):
            self._is_trained = True
            self._take_norms()
        elif all(weight.grad is None for weight in weights) and any(p.grad is not None for p in self._parameters):
            self._idle = type(optimizer).__name__

    def _take_norms(self) -> None:
        noted, self._noted = self._noted, None
        if noted is None:
            return
        now = [parameter.grad for parameter in noted.parameters if parameter.grad is not None]
        if len(now) < len(noted.gradients):  # some were cleared
            return
        self._is_written = any(
            gradient is not before or version_of(local(gradient)) != version
            for gradient, before, version in zip(now, noted.gradients, noted.versions, strict=True)
        )
        # A scaler takes its factor out of the gradients, or lets a fused optimizer do that, which writes to none.
        if self._is_written or not noted.is_scaled:
            after = _norms_of(now) if self._is_written else noted.norms
            self._norms = self._device.read(torch.cat([noted.norms, after]))

    def _versions_of_weights(self) -> list[int]:
        return [version_of(parameter) for parameter in self._parameters if not is_sharded(parameter)]


def _norms_of(gradients: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(norm_of_each([local(gradient) for gradient in gradients], 2.0))


def _common_factor(norms: list[float]) -> float:
    """The factor between the first and the second half of the numbers, if it is one for all of them; else 0.0.

    Of a single gradient that is not known: it may have been clipped by itself, which is right on any rank.
    """
    half = len(norms) // 2
    factors = [after / before for before, after in zip(norms[:half], norms[half:], strict=True) if before]
    if len(factors) < 2 or not all(0 < factor < math.inf for factor in factors):
        return 0.0
    return max(factors) if max(factors) <= min(factors) * (1 + _ALIKE) else 0.0
