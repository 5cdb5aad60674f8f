"""PyTorch's operations as a dispatch mode sees them: which are random, write, or read only shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rota.torch_internals import GROUPED_MM, address_of, name_of

_SHAPE_ONLY = frozenset(
    f"{prefix}_{what}" if prefix == "new" else f"{what}_{prefix}"
    for prefix, whats in {"new": ("zeros", "ones", "full", "empty"), "like": ("zeros", "ones", "full", "empty")}.items()
    for what in whats
)
_known: dict[Any, bool] = {}


def is_shape_only(func: Any) -> bool:
    """Whether an operation reads only shape, dtype and device of its tensors."""
    found = _known.get(func)
    if found is None:
        found = _known[func] = name_of(func) in _SHAPE_ONLY
    return found


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
