"""Tensors of a folder under the names that a model of transformers has for them: it renames and fuses as it loads.

language_model.model.norm.weight   ──▶ model.language_model.norm.weight
experts.0.up_proj.weight, experts.0.gate_proj.weight, experts.1…  ──▶ experts.gate_up_proj
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, final

import torch
from torch import nn

from rota.core import reading
from rota.core.errors import FormatError


class Source(Protocol):
    """What a weight is read from: a tensor of a folder, or what is made of several.

    `path`: a file that it is in. `dtype`: a text if PyTorch has none like it.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | str

    def read(self) -> torch.Tensor:
        """Its values."""


S = TypeVar("S", bound=Source)


@final
@dataclass(frozen=True, slots=True)
class _Converter:
    """One of transformers' converters, and the tensors that it joins or splits, with the pattern of each."""

    model: Any
    transform: Any
    first: str  # the first weight that it makes
    parts: list[tuple[str, Source]]

    def results(self) -> Iterator[_Converted]:
        """What it makes, without values. Raises FormatError."""
        names = ", ".join(reading.printable(source.name) for _, source in self.parts[:3])
        try:
            weights = self.run(torch.empty(source.shape, dtype=source.dtype, device="meta") for _, source in self.parts)  # type: ignore[arg-type]
        except Exception as error:
            raise FormatError(
                f"{self.parts[0][1].path}: transformers cannot make {self.first} of {names} and others of their "
                f"pattern ({type(error).__name__}: {error}); make the model that the folder is of"
            ) from error
        for name, value in weights.items():
            yield _Converted(self.parts[0][1].path, name, tuple(value.shape), value.dtype, self)

    def run(self, tensors: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The weights that are made of the values of all parts."""
        transform = copy.deepcopy(self.transform)
        for (pattern, source), tensor in zip(self.parts, tensors, strict=True):
            transform.add_tensor(self.first, source.name, pattern, tensor)
        weights = transform.convert(self.first, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in weights.items()}


@final
@dataclass(slots=True)
class _Converted:
    """A weight that a converter makes."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | str
    converter: _Converter

    def read(self) -> torch.Tensor:
        """Read all that it is made of, and make it."""
        return self.converter.run(source.read() for _, source in self.converter.parts)[self.name]


def converted(model: Any, stored: Mapping[str, S], known: Iterable[str]) -> dict[str, S | _Converted]:
    """The tensors by the names that `from_pretrained` gives them; as they are if `model` is not one of transformers.

    `stored`: the tensors of the folder. `known`: the names of all weights of the model. Raises FormatError if two
    tensors are the same weight, or if shapes do not fit what transformers makes of the tensors.
    """
    if not _is_of_transformers(model):
        return {**stored}
    from transformers import conversion_mapping, core_model_loading

    transforms = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, core_model_loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, core_model_loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    is_known = dict.fromkeys(known, True)
    prefix: str = model.base_model_prefix
    renamed: dict[str, S | _Converted] = {}
    groups: dict[str, list[tuple[str, Source]]] = {}
    for key in sorted(stored, key=core_model_loading.dot_natural_key):  # experts in their order
        name, pattern = core_model_loading.rename_source_key(key, renamings, converters, prefix, is_known)
        if name not in is_known and key in is_known:
            name, pattern = key, None
        if name in is_known and pattern is not None:
            groups.setdefault(name, []).append((pattern, stored[key]))
        else:
            _add(renamed, name if name in is_known else key, stored[key])
    for name, parts in groups.items():
        for weight in _Converter(model, by_pattern[parts[0][0]], name, parts).results():
            _add(renamed, weight.name, weight)
    return renamed


def _is_of_transformers(model: nn.Module | None) -> bool:
    """Whether transformers would rename what `model` loads: its version 4 and older do not."""
    loading = sys.modules.get("transformers.core_model_loading")
    modeling = sys.modules.get("transformers.modeling_utils")
    return loading is not None and modeling is not None and isinstance(model, modeling.PreTrainedModel)


def _add(renamed: dict[str, S | _Converted], name: str, source: S | _Converted) -> None:
    other = renamed.setdefault(name, source)
    if other is not source:
        raise FormatError(
            f"{source.path}: {reading.printable(source.name)} and {reading.printable(other.name)} are both {name} of "
            "the model; get the folder again"
        )
