"""Where a PipelineModule's layers are cut: balanced by number, parameters, layers of a type, or measured time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import nn

from rota.compat.deepspeed.specs import Layer, LayerSpec, build, on_meta
from rota.core.errors import SplitError
from rota.cutting import balanced, by_parameters, by_regex, uniform
from rota.models import Stages
from rota.profiling import profile
from rota.runtime.process_group import on_first

_REPEATS = 5


def partition(layers: Sequence[Layer], method: str, num_parts: int, profile_input: Any) -> list[int]:
    """Return where layers are cut into stages.

    Args:
        layers: The layers of the whole model.
        method: "uniform", "parameters", "type:REGEX" (layers whose class name matches) or "profile". "profile" is
            collective: rank 0 builds all layers, and measures them.
        num_parts: The number of stages.
        profile_input: A micro-batch's input, for "profile".

    Returns:
        `num_parts + 1` boundaries: stage s has the layers from boundary s to before boundary s + 1.

    Raises:
        SplitError: If the method is unknown, or does not work for these layers.
        PipelineError: If measuring fails.
    """
    quantity, _, pattern = method.partition(":")
    quantity = quantity.lower()
    if quantity == "uniform":
        return uniform(len(layers), num_parts)
    if quantity == "parameters":
        return by_parameters([_num_trainable(layer) for layer in layers], num_parts)
    if quantity == "type":
        return by_regex([_name(layer) for layer in layers], pattern, num_parts)
    if quantity == "profile":
        return balanced(_measured_us(layers, profile_input), num_parts)
    raise SplitError(f"partition_method is {method!r}: give 'parameters', 'uniform', 'type:REGEX' or 'profile'")


def _num_trainable(layer: Layer) -> int:
    """Return the number of a layer's parameters that require gradients."""
    module = on_meta(layer)
    return 0 if module is None else sum(p.numel() for p in module.parameters() if p.requires_grad)


def _name(layer: Layer) -> str:
    """Return the name of a layer's class or function."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    return getattr(layer, "__name__", type(layer).__name__)


def _measured_us(layers: Sequence[Layer], profile_input: Any) -> list[int]:
    """Return the forward and backward time of each layer in µs, the same on all ranks."""
    if profile_input is None:
        raise SplitError("partition_method 'profile' measures the layers: give profile_input, a micro-batch's inputs")
    return on_first("measuring the layers", lambda: _measured_here_us(layers, profile_input))


def _measured_here_us(layers: Sequence[Layer], profile_input: Any) -> list[int]:
    """Return the forward and backward time of each layer in µs, measured in this process."""
    with torch.random.fork_rng(devices=[]):
        tied: dict[str, nn.Module] = {}
        stages = Stages([_Called(*build(layer, tied)) for layer in layers])
    costs = profile(stages, (profile_input,), repeats=_REPEATS, here=True)
    return [forward + backward for forward, backward in zip(costs.forward_us, costs.backward_us, strict=True)]


@final
class _Called(nn.Module):
    """A layer as a module, even if it is a function."""

    def __init__(self, module: nn.Module | None, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, value: Any) -> Any:
        return self.function(value)
