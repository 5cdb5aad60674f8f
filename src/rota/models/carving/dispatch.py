"""PyTorch's operations as a dispatch mode sees them: which are random, write, or read only shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]

_SHAPE_ONLY = frozenset(
    f"{prefix}_{what}" if prefix == "new" else f"{what}_{prefix}"
    for prefix, whats in {"new": ("zeros", "ones", "full", "empty"), "like": ("zeros", "ones", "full", "empty")}.items()
    for what in whats
)
_known: dict[Any, bool] = {}


def name_of(func: Any) -> str:
    """An operation's name, without `aten::`."""
    return str(func._schema.name.split("::")[1])


def is_shape_only(func: Any) -> bool:
    """Whether an operation reads only shape, dtype and device of its tensors."""
    found = _known.get(func)
    if found is None:
        found = _known[func] = name_of(func) in _SHAPE_ONLY
    return found


def is_random(func: Any) -> bool:
    """Whether it draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def needs_numbers(func: Any) -> bool:
    """Whether Python sees numbers in its tensors by it: as a value, or as the shape of what it returns."""
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def written_arguments(func: Any, args: tuple[Any, ...]) -> Iterator[Tensor]:
    """The tensors among its positional arguments that it writes to."""
    if not func._schema.is_mutable:
        return
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor))


def storage_of(tensor: Tensor) -> int:
    """A number of the memory that a tensor is in."""
    return int(tensor.untyped_storage()._cdata)


def leaves_of(value: Any) -> Iterator[Any]:
    """What an operation's arguments or results hold: they are in lists, tuples and dicts alone."""
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
