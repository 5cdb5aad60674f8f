"""Whether all ranks update their weights alike between two steps: once, by an optimizer of theirs.

step ──▶ optimizer.step() ──▶ the message that begins the next step
 └─ weights change?            ├─ on whose weights?  refused if others'
    refused at once            └─ on which ranks?    refused if not on all

A weight has changed if an optimizer that has it has stepped, or its version has gone up. Fused optimizers raise no
version, nor do those of DTensors, and compiled ones run no hook: what neither shows is not refused.

Gradients that were written to before the first update are reported once: each rank may have clipped by its own norm.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rota.core.errors import PipelineError
from rota.runtime.json_messages import all_gather_json
from rota.runtime.reducing.norms import local
from rota.runtime.reducing.sharded_stages import is_sharded
from rota.runtime.transport import collective
from rota.torch_internals import version_of, versions_of

_log = logging.getLogger(__name__)


class Report(NamedTuple):
    """What one rank has done since its last step.

    `has_changed`: some weight has. `is_updated`: an optimizer of this rank has stepped, or all weights have changed.
    `is_idle`: there are gradients, and no weight has changed. `stranger`: the class of an optimizer that has stepped
    without any weight of this rank, where none has ever been updated.
    """

    has_changed: bool = False
    is_updated: bool = False
    is_idle: bool = False
    stranger: str = ""

    def flags(self) -> tuple[int, ...]:
        """Flags whose maxima over the ranks go to `refuse_differences`."""
        return int(self.is_updated), int(self.is_idle), int(bool(self.stranger))


NUM_FLAGS = len(Report().flags())


@final
class Updates:
    """Watches one rank's updates, by versions and by a hook that PyTorch calls before each step of any optimizer.

    A step runs inside of it: weights must not change there. Raises PipelineError if they did.

    `named`: the parameters of this rank's stages. `reports_clipping`: there are other ranks, whose gradients belong to
    the norm as well.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], reports_clipping: bool = True) -> None:
        self._names = {parameter: name for name, parameter in named}
        self._parameters, self._reports_clipping = [*self._names], reports_clipping
        self._hook: Any = None  # from the first step on
        self._is_running = False
        self._versions: list[int] | None = None  # in the last step
        self._has_gradients = False  # after it
        self._are_versions_true = not any(map(is_sharded, self._parameters))
        self._has_stepped, self._stranger = False, ""  # since then
        self._was_updated = False  # ever
        #: After a step, until the first update: gradients that nobody but this rank's pipeline should have changed.
        self._gradients: list[tuple[torch.Tensor, int]] = []

    def report(self) -> Report:
        """What has been done since the last step."""
        if self._versions is None:
            return Report()
        now = versions_of(self._parameters)
        is_written = now != self._versions
        has_changed = self._has_stepped or is_written
        is_updated = self._has_stepped or (is_written and self._are_all_written(now))
        is_idle = self._has_gradients and not has_changed and self._are_versions_true
        stranger = self._stranger if is_idle and not self._was_updated else ""
        self._was_updated |= is_updated
        return Report(has_changed, is_updated, is_idle, stranger)

    def _are_all_written(self, now: list[int]) -> bool:
        """An optimizer changes all weights; a script that clamps one of them has not updated this rank."""
        assert self._versions is not None
        pairs = zip(self._parameters, self._versions, now, strict=True)
        written = [before != after for parameter, before, after in pairs if parameter.requires_grad]
        return bool(written) and all(written)

    def __enter__(self) -> None:
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self._before_update)
        self._versions = versions_of(self._parameters)
        self._has_stepped, self._stranger, self._is_running, self._gradients = False, "", True, []

    def __exit__(self, kind: object, *_: object) -> None:
        self._is_running = False
        if kind is not None:
            return
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

    def watch_gradients(self) -> None:
        """Report what the script does to the gradients of this step, which are complete, before its first update."""
        if self._reports_clipping and not self._was_updated:
            gradients = (parameter.grad for parameter in self._parameters)
            self._gradients = [((own := local(g)), version_of(own)) for g in gradients if g is not None]

    def forget_gradients(self) -> None:
        """The pipeline itself changes them now."""
        self._gradients = []

    def begin_again(self) -> None:
        """The next step is the first one."""
        self._versions, self._gradients = None, []

    def close(self) -> None:
        """Watch no longer."""
        if self._hook is not None:
            self._hook.remove()

    def _before_update(self, optimizer: torch.optim.Optimizer, _: object, __: object) -> None:
        """Before a step of any optimizer of this process."""
        if torch.compiler.is_compiling():
            return
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        if any(weight in self._names for weight in weights):
            if self._is_running:
                raise PipelineError(
                    f"{type(optimizer).__name__}.step() was called while pipeline.step ran, as in a hook of the "
                    f"backward, so each micro-batch would update weights by its own gradient, before the others have "
                    f"run; call it after pipeline.step(…)"
                )
            self._has_stepped = True
            if any(version_of(gradient) != version for gradient, version in self._gradients):
                _log.warning(
                    "gradients of this rank were written to between pipeline.step and %s.step(); if that was "
                    "torch.nn.utils.clip_grad_norm_, each rank has clipped by the norm of its own stages: use "
                    "pipeline.clip_grad_norm_, which takes the norm of the whole model",
                    type(optimizer).__name__,
                )
            self.forget_gradients()
        elif all(weight.grad is None for weight in weights):
            self._stranger = type(optimizer).__name__


def refuse_differences(agreed: Sequence[int], report: Report, names: Sequence[str], group: dist.ProcessGroup) -> None:
    """Refuse what the ranks have done since the last step if it does not fit together. Collective.

    `agreed`: the maxima of the `flags` of all ranks' reports. `report`: this rank's. `group`: all processes, which have
    these `names`. Raises PipelineError, on all ranks.
    """
    is_updated, is_idle, has_stranger = agreed
    if not (has_stranger or (is_updated and is_idle)):
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
    updated = next(name for name, report in by_name.items() if report.is_updated)
    idle = next(name for name, report in by_name.items() if report.is_idle)
    raise PipelineError(
        f"since the last step, the weights of {updated} have been updated, but not those of {idle}, which have "
        f"gradients; call optimizer.step() after a step on all ranks or on none, and go back to weights from "
        f"before that step. Weights that are not to be trained need requires_grad_(False)"
    )
