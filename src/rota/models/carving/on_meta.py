"""A forward of a model on the meta device, with a batch that has data.

What is computed from the batch alone, such as masks and positions, has data, so the forward can branch on it. What is
computed from weights has only a shape. So has a large tensor made from nothing, such as the causal mask that attention
makes for itself in each layer: with data, those of a long sample would fill the memory.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from rota.models.carving.operations import leaves_of, mapped, run_on_meta
from rota.torch_internals import TorchDispatchMode

_META, _CPU = torch.device("meta"), torch.device("cpu")
_MOST_ELEMENTS = 2**22  # of a tensor that is made from nothing and has data


def is_on_meta(model: nn.Module) -> bool:
    """Whether a weight of the model has no memory."""
    return any(parameter.is_meta for parameter in model.parameters())


@final
class OnMeta(TorchDispatchMode):
    """Lets tensors with and without data be used together."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation on data if all its tensors have it, else on shapes."""
        del types
        kwargs = kwargs or {}
        read = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(tensor.is_meta for tensor in read):
            args, kwargs = mapped(_shape_of, args), mapped(_shape_of, kwargs)
            return run_on_meta(func, args, kwargs)
        if not read and "device" in kwargs:
            made = func(*args, **{**kwargs, "device": _META})
            if isinstance(made, Tensor) and made.numel() > _MOST_ELEMENTS:
                return made
        return func(*mapped(_on_cpu, args), **mapped(_on_cpu, kwargs))


def _shape_of(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return _META
    return leaf.detach().to("meta") if isinstance(leaf, Tensor) and not leaf.is_meta else leaf


def _on_cpu(leaf: Any) -> Any:
    return _CPU if leaf == _META and isinstance(leaf, torch.device) else leaf
