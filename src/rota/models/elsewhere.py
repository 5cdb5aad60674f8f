"""Weights of stages that other ranks run: freed here, after which the whole model refuses to be used."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, final

import torch
from torch import nn

from rota.core.errors import PipelineError
from rota.models.replacing import replace
from rota.models.stages import Stages


def free_elsewhere(stages: Stages, local: Iterable[int]) -> None:
    """Free the weights of the model that was split, but for those of `local` stages: they move to meta.

    They stay the same objects. The model then refuses a forward and a `state_dict`. Stages made by hand keep theirs.
    """
    model = stages.unsplit
    if not isinstance(model, nn.Module):
        return
    here = {parameter for stage in local for parameter in stages[stage].parameters()}
    elsewhere = {parameter for module in stages.modules for parameter in module.parameters()} - here
    if elsewhere.isdisjoint(model.parameters()):
        return
    holders = [inner for module in (*stages.modules, model) for inner in module.modules()]
    for parameter in elsewhere.intersection(model.parameters()):
        if type(parameter) is nn.Parameter and not parameter.is_meta:
            with suppress(PipelineError):  # in use, as by the graph of an earlier forward: it keeps its memory
                replace(parameter, torch.empty_like(parameter, device="meta"), holders)
    refusal = _Refusal({parameter for parameter in model.parameters() if parameter not in here})
    model.register_forward_pre_hook(refusal)
    model.register_state_dict_pre_hook(refusal)


def refuse_incomplete(model: nn.Module) -> None:
    """Raises PipelineError if weights of `model` have been freed."""
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, _Refusal):
            hook(model)


@final
class _Refusal:
    """A hook before a forward or a `state_dict`: it refuses a model that has one of these parameters."""

    def __init__(self, gone: set[nn.Parameter]) -> None:
        self._gone = gone

    def __deepcopy__(self, memo: Any) -> _Refusal:
        """The same: a copy of the model has parameters of its own, which may get values."""
        return self

    def __call__(self, module: nn.Module, *_: Any) -> None:
        names = [name for name, parameter in module.named_parameters() if parameter in self._gone]
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise PipelineError(
                f"{names[0]}{more} of this {type(module).__name__} was freed when the Pipeline was made, because "
                "another rank trains it: use pipeline.evaluate or pipeline.forward, gather the whole model on the "
                "first rank by rota.gather_weights(pipeline), or make another model"
            )
