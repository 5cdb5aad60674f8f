"""Profile: a model's layers at one or several micro-batch sizes, and what the figures hold for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from rota import reading
from rota.errors import FormatError, PlacementError
from rota.layers import LayerCosts


@final
@dataclass(frozen=True, slots=True)
class Profile(Mapping[int, LayerCosts]):
    """By number of rows the costs of the model's layers; `layers` has one entry for each number, ascending.

    `key` says by name what the figures hold for: model, inputs, device, versions. Where one of these is another now,
    the figures are stale. All entries are of one model: they have the same cuts. Raises PlacementError.
    """

    layers: tuple[LayerCosts, ...]
    key: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.layers:
            raise PlacementError("layers is empty: a profile has the layers at one micro-batch size at least")
        ordered = tuple(sorted(self.layers, key=lambda layers: layers.rows))
        object.__setattr__(self, "layers", ordered)
        if len({layers.rows for layers in ordered}) < len(ordered):
            raise PlacementError(f"layers has {reading.short(list(self))} rows: give each number of rows once")
        for layers in ordered[1:]:
            if layers.cuts != ordered[0].cuts:
                raise PlacementError(
                    f"layers of {layers.rows} rows have other cuts than those of {ordered[0].rows}: a profile is of "
                    "one model"
                )

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
        """This one with the entry for `layers.rows` added or replaced, and what `key` says of it."""
        others = tuple(entry for entry in self.layers if entry.rows != layers.rows)
        return Profile((*others, layers), tuple({**dict(self.key), **key}.items()))

    def to_json(self) -> str:
        """One line a number of rows; `from_json` reads it back."""
        fields: dict[str, Any] = {"key": dict(self.key), "layers": [layers.to_fields() for layers in self.layers]}
        return reading.dump("profile", fields)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Raises FormatError or PlacementError, naming the field."""
        document = reading.parse(text, "profile")
        entries = [*document["layers"]]
        if not entries:
            raise FormatError("profile.layers is empty; profile the model anew")
        return cls(
            tuple(LayerCosts.from_fields(entry) for entry in entries),
            tuple((name.text(), value.text()) for name, value in document["key"].items()),
        )
