"""Arguments and outputs of modules as leaves and a structure: tuples, lists, dicts and dataclasses."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

Structure: TypeAlias = Any  # None for a leaf, else (how, type, keys, structures of the items)

PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size})


def flatten(value: Any, leaves: list[Any]) -> Structure:
    """Append the leaves of `value` and return its structure. Whatever is not a known container is a leaf."""
    kind = type(value)
    if kind is Tensor or kind in PLAIN:
        leaves.append(value)
        return None
    if kind is tuple or kind is list:
        return "sequence", kind, None, tuple([flatten(item, leaves) for item in value])
    if isinstance(value, dict) and (dataclasses.is_dataclass(value) or kind in (dict, OrderedDict)):
        how = "fields" if dataclasses.is_dataclass(value) else "mapping"
        return how, kind, tuple(value), tuple([flatten(item, leaves) for item in value.values()])
    if dataclasses.is_dataclass(value):
        names = tuple(field.name for field in dataclasses.fields(value) if field.init)
        return "fields", kind, names, tuple([flatten(getattr(value, name), leaves) for name in names])
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return "named", kind, None, tuple([flatten(item, leaves) for item in value])
    leaves.append(value)
    return None


def rebuild(structure: Structure, leaves: Iterator[Any]) -> Any:
    """The value of that structure with these leaves."""
    if structure is None:
        return next(leaves)
    how, kind, keys, inner = structure
    items = [rebuild(one, leaves) for one in inner]
    if how == "sequence":
        return kind(items)
    if how == "named":
        return kind._make(items)
    named = zip(keys, items, strict=True)
    return kind(**dict(named)) if how == "fields" else kind(named)


def paths(structure: Structure, prefix: str = "") -> Iterator[str]:
    """Where each leaf is: `""`, `[0]`, `.logits`."""
    if structure is None:
        yield prefix
        return
    how, _, keys, inner = structure
    for key, one in zip(keys or range(len(inner)), inner, strict=True):
        yield from paths(one, f"{prefix}.{key}" if how == "fields" else f"{prefix}[{key!r}]")
