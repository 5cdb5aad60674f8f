"""PyTorch's operations as a dispatch mode sees them: which are random, or read only shapes; and running them on meta.

A forward of a model on the meta device gets a batch that has data. What is computed from the batch alone, such as masks
and positions, has data, so the forward can branch on it. What is computed from weights has only a shape. So has a large
tensor, such as the causal mask that attention makes for itself in each layer: with data, those of a long sample would
fill the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, final

import torch
from torch import Tensor

from rota.torch_internals import GROUPED_MM, TorchDispatchMode, address_of, name_of

_META, _CPU = torch.device("meta"), torch.device("cpu")
_MOST_ELEMENTS = 2**22  # of a tensor that is made and has data
_FEW_ELEMENTS = 2**10  # broadcasting no two tensors of so many makes one of more than _MOST_ELEMENTS
_MADE = ("zeros", "ones", "full", "empty")
_SHAPE_ONLY = frozenset((*(f"new_{what}" for what in _MADE), *(f"{what}_like" for what in _MADE)))


@cache
def is_shape_only(func: Any) -> bool:
    """Whether an operation reads only shape, dtype and device of its tensors."""
    return name_of(func) in _SHAPE_ONLY


def is_random(func: Any) -> bool:
    """Whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def needs_numbers(func: Any, args: Any) -> bool:
    """Whether an operation shows values of its tensors to Python: as a number, or as the shape of its result."""
    if func is torch.ops.aten.index.Tensor:  # by whole numbers, its shape is known
        return any(leaf.dtype in (torch.bool, torch.uint8) for leaf in leaves_of(args[1]) if isinstance(leaf, Tensor))
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def storage_of(tensor: Tensor) -> int:
    """A number that identifies the memory that a tensor is in."""
    if type(tensor) not in (Tensor, torch.nn.Parameter):  # a wrapper has none
        return id(tensor)
    return address_of(tensor.untyped_storage())


def leaves_of(value: Any) -> Iterator[Any]:
    """The leaves of an operation's arguments or results, which only lists, tuples and dicts nest."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves_of(item)
    else:
        yield value


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """An operation's arguments or results with each leaf changed."""
    if isinstance(value, (tuple, list)):
        return type(value)([mapped(change, item) for item in value])
    if isinstance(value, dict):
        return {key: mapped(change, item) for key, item in value.items()}
    return change(value)


def run_on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """The operation on meta tensors."""
    if func is GROUPED_MM:  # its meta kernel accepts only bfloat16
        return func(*mapped(_as_bfloat16, args), **mapped(_as_bfloat16, kwargs)).to(args[0].dtype)
    return func(*args, **kwargs)


def _as_bfloat16(leaf: Any) -> Any:
    return leaf.to(torch.bfloat16) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def shape_of(leaf: Any) -> Any:
    """A tensor or a device on meta."""
    if isinstance(leaf, Tensor):
        return leaf if leaf.is_meta else leaf.detach().to("meta")
    return _META if isinstance(leaf, torch.device) else leaf


@final
class OnMeta(TorchDispatchMode):
    """Lets tensors with and without data be used together."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation on data if all its tensors have it, else on shapes."""
        del types
        kwargs = kwargs or {}
        read = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(tensor.is_meta for tensor in read):
            return run_on_meta(func, mapped(shape_of, args), mapped(shape_of, kwargs))
        may_be_large = any(tensor.numel() > _FEW_ELEMENTS for tensor in read) if read else "device" in kwargs
        if may_be_large and not needs_numbers(func, args):
            made = run_on_meta(func, mapped(shape_of, args), mapped(shape_of, kwargs))
            if isinstance(made, Tensor) and made.numel() > _MOST_ELEMENTS:
                return made
        return func(*mapped(_on_cpu, args), **mapped(_on_cpu, kwargs))


def _on_cpu(leaf: Any) -> Any:
    return _CPU if isinstance(leaf, torch.device) and leaf == _META else leaf
