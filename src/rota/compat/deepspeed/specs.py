"""Layers of a PipelineModule that are built later, and on the ranks alone that run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import nn

from rota.compat.deepspeed.utils import call_to_str
from rota.errors import SplitError


class LayerSpec:
    """`typename(*module_args, **module_kwargs)`, not called yet."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not isinstance(typename, type) or not issubclass(typename, nn.Module):
            raise SplitError(f"LayerSpec got {typename!r}: give a subclass of torch.nn.Module, or the layer itself")
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def __repr__(self) -> str:
        return call_to_str(self.typename.__name__, *self.module_args, **self.module_kwargs)

    def build(self) -> nn.Module:
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """All layers with one `key` are one layer, wherever they run: `forward_fn(layer, input)`, or its own forward.

    `tied_weight_attr` names its weight, or several: all its parameters are tied, as they are in the unsplit model.
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
        module = super().build()
        for name in [self.tied_weight_attr] if isinstance(self.tied_weight_attr, str) else self.tied_weight_attr:
            try:
                attrgetter(name)(module)
            except AttributeError:
                raise SplitError(
                    f"tied_weight_attr is {name!r}, which {self!r} of key {self.key!r} has not; name one of its weights"
                ) from None
        return module


#: What a PipelineModule is made of: modules, specs of them, or functions.
Layer: TypeAlias = nn.Module | LayerSpec | Callable[[Any], Any]


def build(layer: Layer, tied: Any) -> tuple[nn.Module | None, Callable[[Any], Any]]:
    """The layer's module, None for a function, and what to call; `tied` has those of each key, built once."""
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
    """The layer's module, a spec's without memory for its weights; None for a function."""
    with torch.device("meta"):
        return build(layer, {})[0]


def refuse_unfit(layers: Sequence[Layer]) -> None:
    """Raises SplitError where something is no layer, or where layers of one key could not be one layer."""
    first: dict[str, TiedLayerSpec] = {}
    for i, layer in enumerate(layers):
        if not isinstance(layer, LayerSpec) and not callable(layer):
            raise SplitError(f"layers[{i}] is {layer!r}: give a module, a LayerSpec or a function")
        if isinstance(layer, TiedLayerSpec):
            one = first.setdefault(layer.key, layer)
            if repr(one) != repr(layer):
                raise SplitError(
                    f"layers[{i}] is {layer!r}, but shares the key {layer.key!r} with {one!r}; make them alike, and "
                    f"say by forward_fn what each does"
                )
