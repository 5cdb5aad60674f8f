"""Profile: costs of a model's layers at one or more micro-batch sizes, and the conditions they were measured under."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, final

import msgspec

from rota.core import reading
from rota.core.errors import PlacementError
from rota.core.layers import LayerCosts
from rota.core.units import angle_repr, count_text


@final
@dataclass(frozen=True, slots=True)
class Profile(Mapping[int, LayerCosts]):
    """A mapping from the number of rows to the costs of the model's layers.

    Attributes:
        layers: One entry per number of rows, in ascending order. All entries have the same cuts.
        key: (name, value) of the conditions: model, inputs, device, versions. If one of them has changed, the profile
            is stale.

    Raises:
        PlacementError: There is no entry, a number of rows appears twice, or the cuts differ.
    """

    layers: tuple[LayerCosts, ...]
    key: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.layers:
            raise PlacementError("layers is empty: a profile needs the layers at one micro-batch size or more")
        ordered = tuple(sorted(self.layers, key=lambda layers: layers.rows))
        object.__setattr__(self, "layers", ordered)
        if len({layers.rows for layers in ordered}) < len(ordered):
            raise PlacementError(f"layers has {reading.short(list(self))} rows: give each number of rows once")
        for layers in ordered[1:]:
            if layers.cuts != ordered[0].cuts:
                raise PlacementError(
                    f"layers of {layers.rows} rows have other cuts than those of {ordered[0].rows}: a profile is for "
                    "one model"
                )

    def __str__(self) -> str:
        """One line."""
        rows = ", ".join(map(str, [*self][:4])) + ("" if len(self) <= 4 else f", … {[*self][-1]}")
        return f"Profile of {count_text(self.layers[0].num_layers, 'layer')} at {rows} rows per micro-batch"

    __repr__ = angle_repr

    def __getitem__(self, rows: int) -> LayerCosts:
        found = next((layers for layers in self.layers if layers.rows == rows), None)
        if found is None:
            raise KeyError(rows)
        return found

    def __iter__(self) -> Iterator[int]:
        return (layers.rows for layers in self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def with_layers(self, layers: LayerCosts, key: Mapping[str, str]) -> Profile:
        """This profile with the entry for `layers.rows` added or replaced, and its key updated by `key`."""
        others = tuple(entry for entry in self.layers if entry.rows != layers.rows)
        return Profile((*others, layers), tuple({**dict(self.key), **key}.items()))

    def to_json(self) -> str:
        """The text of a "profile" file, one line per number of rows, which `from_json` reads."""
        fields: dict[str, Any] = {"key": dict(self.key), "layers": [layers.to_fields() for layers in self.layers]}
        return reading.dump("profile", fields, Profile.from_json)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read what `to_json` wrote. Raises FormatError or PlacementError, which name the field."""
        file = reading.parse(text, "profile").read(ProfileFile)
        return cls(file.layers, tuple(file.key.items()))


class ProfileFile(msgspec.Struct):
    """A profile in JSON."""

    key: dict[str, str]
    layers: Annotated[tuple[LayerCosts, ...], msgspec.Meta(min_length=1)]
