"""Whether all ranks update their weights alike between two steps: once, by an optimizer of theirs, after the same clip.

step ──▶ gradients noted ──▶ the script clips them ──▶ optimizer.step() ──▶ the message that begins the next step
 └─ weights change?                                    ├─ on whose weights?  refused if others', or not on all ranks
    refused at once                                    └─ by what factor?    refused if it differs between ranks

A weight has changed if an optimizer that has it has stepped, or its version has gone up. Fused optimizers raise no
version, nor do those of DTensors, and compiled ones run no hook: what neither shows is not refused.

Factors are compared after steps 1, 2 and 3, and, as long as the script writes to gradients before the update, after
steps 4, 8, 16 and so on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rota.core.errors import PipelineError
from rota.runtime.device.numbers import MOST_BITS, bits_of, number_of
from rota.runtime.device.protocol import Device
from rota.runtime.json_messages import all_gather_json
from rota.runtime.reducing.norms import local, norm_of_each
from rota.runtime.reducing.sharded_stages import is_sharded
from rota.runtime.transport import collective
from rota.torch_internals import version_of, versions_of

_FIRST = 3  # steps after which factors are compared in any case
_ALIKE = 0.01  # how much the factors of one rank's weights may differ: bfloat16 rounds to 0.4%
_ALIKE_ON_RANKS = 0.02


class Report(NamedTuple):
    """What one rank has done since its last step.

    `factor`: what all gradients were multiplied by before the update; 0.0 if there is no such factor, or it is not
    known. `has_changed`: some weight has. `is_updated`: an optimizer of this rank has stepped, or all weights have
    changed. `is_idle`: there are gradients, and no weight has changed. `stranger`: the class of an optimizer that has
    stepped without any weight of this rank, where none has ever been updated.
    """

    factor: float = 0.0
    has_changed: bool = False
    is_updated: bool = False
    is_idle: bool = False
    stranger: str = ""

    def flags(self) -> tuple[int, ...]:
        """Five flags; their maxima over the ranks go to `refuse_differences`."""
        bits = bits_of(self.factor)
        range_bits = (bits, MOST_BITS - bits) if bits else (0, 0)
        return *range_bits, int(self.is_updated), int(self.is_idle), int(bool(self.stranger))


NUM_FLAGS = len(Report().flags())


class _Noted(NamedTuple):
    """The gradients of a step at its end, and their norms, one after another on the device."""

    parameters: list[nn.Parameter]
    gradients: list[torch.Tensor]
    versions: list[int]
    norms: torch.Tensor
    is_scaled: bool


@final
class Updates:
    """Watches one rank's updates, by versions and by a hook that PyTorch calls before each step of any optimizer.

    Args:
        named: The parameters of this rank's stages.
        device: Where they are.
        compares: Whether there are other ranks to compare factors with.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], device: Device, compares: bool) -> None:
        self._names = {parameter: name for name, parameter in named}
        self._parameters, self._device, self._compares = [*self._names], device, compares
        self._hook: Any = None  # from the first step on
        self._is_running = False
        self._versions: list[int] | None = None  # in the last step
        self._has_gradients = False  # after it
        self._are_versions_true = not any(map(is_sharded, self._parameters))
        self._has_stepped, self._stranger = False, ""  # since then
        self._was_updated = False  # ever
        self._num_steps = 0
        self._noted: _Noted | None = None
        #: Norms before and after what the script did to the gradients; None: unknown.
        self._norms: Callable[[], list[float]] | None = None
        self._is_written = False  # gradients were written to before an update

    def report(self) -> Report:
        """What has been done since the last step. May wait for the device."""
        if self._versions is None:
            return Report()
        norms, self._norms, self._noted = self._norms, None, None
        now = versions_of(self._parameters)
        is_written = now != self._versions
        has_changed = self._has_stepped or is_written
        is_updated = self._has_stepped or (is_written and self._are_all_written(now))
        is_idle = self._has_gradients and not has_changed and self._are_versions_true
        stranger = self._stranger if is_idle and not self._was_updated else ""
        self._was_updated |= is_updated
        factor = 0.0 if norms is None else _common_factor(norms())
        return Report(factor, has_changed, is_updated, is_idle, stranger)

    def _are_all_written(self, now: list[int]) -> bool:
        """An optimizer changes all weights; a script that clamps one of them has not updated this rank."""
        assert self._versions is not None
        pairs = zip(self._parameters, self._versions, now, strict=True)
        written = [before != after for parameter, before, after in pairs if parameter.requires_grad]
        return bool(written) and all(written)

    @contextmanager
    def refused(self) -> Iterator[None]:
        """While a step runs: weights must not change.

        Raises:
            PipelineError: They did.
        """
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self._before_update)
        self._versions = versions_of(self._parameters)
        self._has_stepped, self._stranger, self._is_running = False, "", True
        try:
            yield
        finally:
            self._is_running = False
        if (now := versions_of(self._parameters)) != self._versions:
            self._refuse_written(now)
        self._has_gradients = any(parameter.grad is not None for parameter in self._parameters)

    def _refuse_written(self, now: list[int]) -> None:
        assert self._versions is not None
        versions, self._versions = self._versions, now
        for (parameter, name), before, after in zip(self._names.items(), versions, now, strict=True):
            if before != after and parameter.requires_grad:
                raise PipelineError(
                    f"{name} was written to while pipeline.step ran, so its micro-batches were computed with different "
                    f"weights; update weights after pipeline.step(…), not in hooks of the backward, and freeze what a "
                    f"forward writes to (requires_grad_(False))"
                )

    def end(self, is_scaled: bool) -> None:
        """After a step that has reduced its gradients. `is_scaled`: they have the factor of a GradScaler."""
        self._num_steps += 1
        is_power_of_2 = not self._num_steps & (self._num_steps - 1)
        is_due = self._num_steps <= _FIRST or (is_power_of_2 and (self._is_written or not self._was_updated))
        if self._compares and is_due:
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
        self._num_steps, self._noted, self._norms, self._versions = 0, None, None, None

    def close(self) -> None:
        """Watch no longer."""
        if self._hook is not None:
            self._hook.remove()

    def _before_update(self, optimizer: torch.optim.Optimizer, _: object, __: object) -> None:
        """Before a step of any optimizer of this process. Does not wait for the device."""
        if torch.compiler.is_compiling():
            return
        if any(weight in self._names for group in optimizer.param_groups for weight in group["params"]):
            if self._is_running:
                raise PipelineError(
                    f"{type(optimizer).__name__}.step() was called while pipeline.step ran, as in a hook of the "
                    f"backward, so each micro-batch would update weights by its own gradient, before the others have "
                    f"run; call it after pipeline.step(…)"
                )
            self._has_stepped = True
            self._take_norms()
        elif all(weight.grad is None for group in optimizer.param_groups for weight in group["params"]):
            self._stranger = type(optimizer).__name__

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


def refuse_differences(agreed: Sequence[int], report: Report, names: Sequence[str], group: dist.ProcessGroup) -> None:
    """Refuse what the ranks have done since the last step if it does not fit together. Collective.

    Args:
        agreed: The maxima of the `flags` of all ranks' reports.
        report: This rank's.
        names: The processes' names.
        group: All processes.

    Raises:
        PipelineError: On all ranks.
    """
    high, low, is_updated, is_idle, has_stranger = agreed
    highest, lowest = number_of(high), number_of(MOST_BITS - low)
    differ = highest > lowest * (1 + _ALIKE_ON_RANKS)
    if not (differ or has_stranger or (is_updated and is_idle)):
        return
    with collective("comparing updates"):
        reports = [Report(*fields) for fields in all_gather_json(report, group)]
    by_name = dict(zip(names, reports, strict=True))
    if has_stranger:
        name, stranger = next((name, report.stranger) for name, report in by_name.items() if report.stranger)
        raise PipelineError(
            f"{stranger}.step() was called on {name}, but this optimizer has none of the weights of this rank's "
            f"stages, and none of its own has a gradient, so nothing is trained; make it from pipeline.parameters(), "
            f"not from another copy of the model: {stranger}(pipeline.parameters(), …)"
        )
    if is_updated and is_idle:
        updated = next(name for name, report in by_name.items() if report.is_updated)
        idle = next(name for name, report in by_name.items() if report.is_idle)
        raise PipelineError(
            f"since the last step, the weights of {updated} have been updated, but not those of {idle}, which have "
            f"gradients; call optimizer.step() after a step on all ranks or on none, and go back to weights from "
            f"before that step. Weights that are not to be trained need requires_grad_(False)"
        )
    factors = {report.factor: name for name, report in by_name.items()}
    raise PipelineError(
        f"after the last step, before its update, the gradients were multiplied by {lowest:.3g} on {factors[lowest]} "
        f"and by {highest:.3g} on {factors[highest]}, as torch.nn.utils.clip_grad_norm_ does, which takes each rank's "
        f"own norm; use pipeline.clip_grad_norm_, which takes the norm of the whole model, and go back to weights from "
        f"before that step. To scale ranks differently on purpose, do it in optimizer.register_step_pre_hook"
    )


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
