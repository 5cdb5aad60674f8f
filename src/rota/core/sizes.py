"""What a stage costs as a function of a micro-batch's size: constant, linear and quadratic terms of its lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, NamedTuple, TypeAlias

from msgspec import Meta

from rota.core import reading
from rota.core.costs import Costs
from rota.core.errors import PlacementError
from rota.core.reading import Whole
from rota.core.text import angle_repr, count_text

_Number: TypeAlias = Annotated[float, Meta(ge=-1e15, le=1e15)]


class Size(NamedTuple):
    """The size of a micro-batch, from which its costs in every stage follow.

    Attributes:
        tokens: Positions computed, padding included.
        squares: Sum over its rows of the square of the row's computed length: what attention costs.
    """

    tokens: int
    squares: int

    @classmethod
    def padded(cls, lengths: Sequence[int]) -> Size:
        """Samples of these lengths as rows that are all padded to the longest."""
        rows, length = len(lengths), max(lengths)
        return cls(rows * length, rows * length * length)

    @classmethod
    def packed(cls, lengths: Sequence[int]) -> Size:
        """Samples of these lengths one after another in one row, where each attends to only itself."""
        return cls(sum(lengths), sum(length * length for length in lengths))


class Curve(NamedTuple):
    """A figure of a stage: constant + per_token · tokens + per_square · squares.

    Attributes:
        constant: What every micro-batch costs.
        per_token: What each token adds.
        per_square: What each unit of `Size.squares` adds.
    """

    constant: _Number = 0.0
    per_token: _Number = 0.0
    per_square: _Number = 0.0

    def at(self, size: Size) -> float:
        """The figure of a micro-batch of this size, not rounded."""
        return self.constant + self.per_token * size.tokens + self.per_square * size.squares


@dataclass(frozen=True, slots=True)
class SizeModel:
    """Costs as functions of the size of a micro-batch: the fields of `Costs`, with a curve instead of each number.

    Attributes:
        forward_us: [num_stages], as in `Costs`.
        backward_us: [num_stages].
        weight_us: [num_stages]. None: the backward is not split.
        activation_bytes: [num_stages].
        input_frees_bytes: [num_stages]. None: half of `activation_bytes`.
        boundary_bytes: [num_edges].
        gradient_bytes: [num_edges]. None: as `boundary_bytes`.
        forward_peak_bytes: [num_stages], or empty for none.
        backward_peak_bytes: [num_stages], or empty for none.
        weight_peak_bytes: [num_stages], or empty for none.
        static_bytes: [num_stages] whole bytes, or empty for none.
        reduce_us: [num_stages] whole µs, or empty for none.
        optimizer_us: [num_stages] whole µs, or empty for none.
        edges: (source, target) stages. None: a chain.
        error: Largest relative error of a time at the sizes that were measured. 0: given, not measured.
        note: Where the numbers come from.

    Raises:
        PlacementError: A field has the wrong number of entries.
    """

    forward_us: tuple[Curve, ...]
    backward_us: tuple[Curve, ...]
    weight_us: tuple[Curve, ...] | None = None
    activation_bytes: tuple[Curve, ...] = ()
    input_frees_bytes: tuple[Curve, ...] | None = None
    boundary_bytes: tuple[Curve, ...] = ()
    gradient_bytes: tuple[Curve, ...] | None = None
    forward_peak_bytes: tuple[Curve, ...] = ()
    backward_peak_bytes: tuple[Curve, ...] = ()
    weight_peak_bytes: tuple[Curve, ...] = ()
    static_bytes: tuple[Whole, ...] = ()
    reduce_us: tuple[Whole, ...] = ()
    optimizer_us: tuple[Whole, ...] = ()
    edges: tuple[tuple[Whole, Whole], ...] | None = None
    error: _Number = 0.0
    note: str = ""

    def __str__(self) -> str:
        """One line."""
        return f"SizeModel of {count_text(len(self.forward_us), 'stage')}, times within {self.error:.1%}"

    __repr__ = angle_repr

    def __post_init__(self) -> None:
        if not self.forward_us:
            raise PlacementError("forward_us is empty: a model has at least one stage")
        num_edges = self.num_stages - 1 if self.edges is None else len(self.edges)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("edges", "error", "note") or value is None:
                continue
            count = num_edges if field.name in ("boundary_bytes", "gradient_bytes") else self.num_stages
            if not value:
                entry = 0 if field.name in _WHOLE else Curve()
                object.__setattr__(self, field.name, (entry,) * count)
            elif len(value) != count:
                raise PlacementError(f"{field.name} has {len(value)} entries; give {count}")

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.forward_us)

    def costs(self, size: Size) -> Costs:
        """The costs of a micro-batch of this size: times rounded to the nearest µs, bytes rounded up."""
        values: dict[str, Any] = {name: getattr(self, name) for name in (*_WHOLE, "edges", "note")}
        for name in CURVES:
            curves = getattr(self, name)
            rounded = _nearest_us if name.endswith("_us") else math.ceil
            values[name] = None if curves is None else tuple(rounded(curve.at(size)) for curve in curves)
        if values["input_frees_bytes"] is not None:
            held = values["activation_bytes"]
            values["input_frees_bytes"] = tuple(map(min, values["input_frees_bytes"], held))
        return Costs(**values)

    def to_json(self) -> str:
        """The text of a "sizes" file, one line per stage and figure, which `from_json` reads."""
        values = asdict(self)
        curves = {name: values.pop(name) for name in CURVES}
        return reading.dump("sizes", curves | values, SizeModel.from_json)

    @classmethod
    def from_json(cls, text: str) -> SizeModel:
        """Read what `to_json` wrote. Raises FormatError or PlacementError, which name the field."""
        return reading.parse(text, "sizes").read(cls)


_WHOLE = ("static_bytes", "reduce_us", "optimizer_us")
#: The fields of `SizeModel` that hold curves.
CURVES = tuple(field.name for field in fields(SizeModel) if field.name not in (*_WHOLE, "edges", "error", "note"))


def _nearest_us(value: float) -> int:
    return max(math.floor(value + 0.5), 0)  # no time is below 0
