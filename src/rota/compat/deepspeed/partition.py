"""Where a PipelineModule's layers are cut: evenly by number, parameters, layers of a kind, or measured time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import nn

from rota.compat.deepspeed.specs import Layer, LayerSpec, build, on_meta
from rota.cutting import balanced, by_parameters, by_regex, uniform
from rota.errors import SplitError
from rota.models import Stages
from rota.profiling import profile_here
from rota.runtime.joining import on_first

_REPEATS = 5


def partition(layers: Sequence[Layer], method: str, num_parts: int, profile_input: Any) -> list[int]:
    """Boundaries by `method`: "uniform", "parameters", "type:REGEX" or "profile". Raises SplitError.

    "profile" is collective: rank 0 builds all layers, and measures them on `profile_input`; PipelineError if it fails.
    """
    what, _, pattern = method.partition(":")
    what = what.lower()
    if what == "uniform":
        return uniform(len(layers), num_parts)
    if what == "parameters":
        return by_parameters([_num_trainable(layer) for layer in layers], num_parts)
    if what == "type":
        return by_regex([_name(layer) for layer in layers], pattern, num_parts)
    if what == "profile":
        return balanced(_measured_us(layers, profile_input), num_parts)
    raise SplitError(f"partition_method is {method!r}: give 'parameters', 'uniform', 'type:REGEX' or 'profile'")


def _num_trainable(layer: Layer) -> int:
    module = on_meta(layer)
    return 0 if module is None else sum(p.numel() for p in module.parameters() if p.requires_grad)


def _name(layer: Layer) -> str:
    """Of its class, or function."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    return getattr(layer, "__name__", type(layer).__name__)


def _measured_us(layers: Sequence[Layer], profile_input: Any) -> list[int]:
    """Forward and backward of each layer, the same on all ranks."""
    if profile_input is None:
        raise SplitError("partition_method 'profile' measures the layers: give profile_input, a micro-batch's inputs")
    return on_first("measuring the layers", lambda: _measured_here_us(layers, profile_input))


def _measured_here_us(layers: Sequence[Layer], profile_input: Any) -> list[int]:
    with torch.random.fork_rng(devices=[]):
        tied: dict[str, nn.Module] = {}
        stages = Stages([_Called(*build(layer, tied)) for layer in layers])
    costs = profile_here(stages, (profile_input,), repeats=_REPEATS)
    return [forward + backward for forward, backward in zip(costs.forward_us, costs.backward_us, strict=True)]


@final
class _Called(nn.Module):
    """A layer as a module, whatever it is."""

    def __init__(self, module: nn.Module | None, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, value: Any) -> Any:
        return self.function(value)
