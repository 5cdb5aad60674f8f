"""Layers of a PipelineModule: specs, which are built later, on the ranks that run them; and where layers are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias, final

import torch
from torch import nn

from rota.compat.deepspeed.utils import call_to_str
from rota.core.errors import SplitError
from rota.cutting import balanced, by_regex, uniform
from rota.models import Stages
from rota.profiling import StageProfileOptions, profile
from rota.runtime.process_group import on_first

_REPEATS = 5


class LayerSpec:
    """A layer that is not built yet.

    Args:
        typename: The class of the layer.
        module_args: Its positional arguments.
        module_kwargs: Its keyword arguments.

    Raises:
        SplitError: If `typename` is not a subclass of torch.nn.Module.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not isinstance(typename, type) or not issubclass(typename, nn.Module):
            raise SplitError(f"LayerSpec got {typename!r}: give a subclass of torch.nn.Module, or the layer itself")
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def __repr__(self) -> str:
        return call_to_str(self.typename.__name__, *self.module_args, **self.module_kwargs)

    def build(self) -> nn.Module:
        """Return a new layer."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that is tied to the layers with the same `key`: all of them are one layer, wherever they run.

    Args:
        key: The name of the tied layer.
        typename: The class of the layer.
        module_args: Its positional arguments.
        forward_fn: Called with (layer, input) instead of the layer's forward.
        tied_weight_attr: The name of the tied weight, or several names. All parameters of the layer are tied, as they
            are in the whole model.
        module_kwargs: Its keyword arguments.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = tied_weight_attr

    def build(self) -> nn.Module:
        """Return a new layer, or raise SplitError if it has no weight of that name."""
        module = super().build()
        for name in [self.tied_weight_attr] if isinstance(self.tied_weight_attr, str) else self.tied_weight_attr:
            try:
                attrgetter(name)(module)
            except AttributeError:
                raise SplitError(
                    f"tied_weight_attr is {name!r}, but {self!r} of key {self.key!r} has no such weight; name one"
                ) from None
        return module


#: One layer of a PipelineModule: a module, a spec, or a function.
Layer: TypeAlias = nn.Module | LayerSpec | Callable[[Any], Any]


def build(layer: Layer, tied: Any) -> tuple[nn.Module | None, Callable[[Any], Any]]:
    """Return the layer's module (None for a function) and what to call; `tied` has the one module of each key."""
    if isinstance(layer, TiedLayerSpec):
        if layer.key not in tied:
            tied[layer.key] = layer.build()
        module: nn.Module = tied[layer.key]
        return module, module if layer.forward_fn is None else partial(layer.forward_fn, module)
    if isinstance(layer, LayerSpec):
        module = layer.build()
        return module, module
    return (layer if isinstance(layer, nn.Module) else None), layer


def on_meta(layer: Layer) -> nn.Module | None:
    """Return the layer's module (None for a function), built without memory for its weights if it is a spec."""
    with torch.device("meta"):
        return build(layer, {})[0]


def refuse_unfit(layers: Sequence[Layer]) -> None:
    """Raise SplitError if something is not a layer, or if layers with one key cannot be one layer."""
    first: dict[str, TiedLayerSpec] = {}
    for i, layer in enumerate(layers):
        if not isinstance(layer, LayerSpec) and not callable(layer):
            raise SplitError(f"layers[{i}] is {layer!r}: give a module, a LayerSpec or a function")
        if isinstance(layer, TiedLayerSpec):
            other = first.setdefault(layer.key, layer)
            if repr(other) != repr(layer):
                raise SplitError(
                    f"layers[{i}] is {layer!r}, but shares the key {layer.key!r} with {other!r}; make them equal, and "
                    f"give them different forward_fn"
                )


# --- cuts -------------------------------------------------------------------------------------------------------------


def partition(layers: Sequence[Layer], method: str, num_parts: int, profile_input: Any) -> list[int]:
    """Return where layers are cut: stage s has the layers from boundary s to before boundary s + 1.

    `method` is "uniform", "parameters", "type:REGEX" (layers whose class name matches) or "profile". "profile" is
    collective: rank 0 builds all layers, and measures them with `profile_input`, a micro-batch's input.

    Raises:
        SplitError: If the method is unknown, or does not work for these layers.
        PipelineError: If measuring fails.
    """
    quantity, _, pattern = method.partition(":")
    quantity = quantity.lower()
    if quantity == "uniform":
        return uniform(len(layers), num_parts)
    if quantity == "parameters":
        modules = map(on_meta, layers)
        return balanced([0 if module is None else _num_trainable(module) for module in modules], num_parts)
    if quantity == "type":
        return by_regex([_name(layer) for layer in layers], pattern, num_parts)
    if quantity == "profile":
        if profile_input is None:
            raise SplitError("partition_method 'profile' measures layers: give profile_input, a micro-batch's inputs")
        measured_us = on_first("measuring the layers", lambda: _measured_here_us(layers, profile_input))
        return balanced(measured_us, num_parts)
    raise SplitError(f"partition_method is {method!r}: give 'parameters', 'uniform', 'type:REGEX' or 'profile'")


def _num_trainable(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _name(layer: Layer) -> str:
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    return getattr(layer, "__name__", type(layer).__name__)


def _measured_here_us(layers: Sequence[Layer], profile_input: Any) -> list[int]:
    with torch.random.fork_rng(devices=[]):
        tied: dict[str, nn.Module] = {}
        stages = Stages([_Called(*build(layer, tied)) for layer in layers])
    costs = profile(stages, (profile_input,), options=StageProfileOptions(repeats=_REPEATS, here=True))
    return [forward + backward for forward, backward in zip(costs.forward_us, costs.backward_us, strict=True)]


@final
class _Called(nn.Module):
    def __init__(self, module: nn.Module | None, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, value: Any) -> Any:
        return self.function(value)
