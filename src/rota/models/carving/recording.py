"""What one forward of a model did: which units it called, and what every value was made from.

A label is a parameter, a buffer, an input, a draw of random numbers, a value that a unit returned, or something that a
unit made and did not return. Sets of labels are ints, one bit per label.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

from rota.models.carving.units import Structure

LabelSet: TypeAlias = int


@dataclass(frozen=True, slots=True)
class FromModel:
    """A parameter or a buffer, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class FromInput:
    """A tensor in the batch's input of that name."""

    name: str


@dataclass(frozen=True, slots=True)
class Drawn:
    """Random numbers that code between units drew."""

    number: int
    by: str
    module: str  # the innermost one that runs, if no unit is in it
    rates: str  # see `rates_read`


@dataclass(frozen=True, slots=True, order=True)
class Returned:
    """Leaf `leaf` of what a unit returned in call `call`, or of what its inner module `inner` returned the nth time."""

    call: int
    leaf: int
    inner: str = ""
    nth: int = 0


@dataclass(frozen=True, slots=True)
class Within:
    """What a unit made in that call and did not return."""

    call: int


Label: TypeAlias = FromModel | FromInput | Drawn | Returned | Within


class Leaf(NamedTuple):
    """A leaf of what a module returned: one of its arguments (by its number), a tensor, or a plain value."""

    argument: int | None
    is_tensor: bool
    value: Any = None  # of a plain leaf
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    same_shape_argument: int | None = None  # the first argument of the same shape
    overwritten: int | None = None  # the argument whose memory it is, with new values
    inner: Returned | None = None  # of a module in a unit: the value that has this tensor


class Output(NamedTuple):
    """What a module returned in one call."""

    structure: Structure
    leaves: tuple[Leaf, ...]


class Write(NamedTuple):
    """Code between units wrote `source` into a tensor that was made from `target`, before unit call `before`."""

    before: int
    target: LabelSet
    source: LabelSet
    into: str | None  # the parameter or buffer whose memory that is


class Inspection(NamedTuple):
    """Code between units inspected values, before unit call `before`."""

    before: int
    seen: LabelSet


@dataclass(slots=True)
class Recording:
    """What one forward did."""

    units: list[str]  # paths
    cut_points: frozenset[int] = frozenset()  # the units that are CutPoints
    labels: list[Label] = field(default_factory=list)  # by bit
    calls: list[int] = field(default_factory=list)  # the unit of each call, in order
    reads: list[LabelSet] = field(default_factory=list)  # by call
    outputs: list[Output] = field(default_factory=list)  # by call
    inner_outputs: dict[tuple[int, str, int], Output] = field(default_factory=dict)  # by call, inner path, nth time
    writes: list[Write] = field(default_factory=list)
    inspections: list[Inspection] = field(default_factory=list)
    mutated: LabelSet = 0  # of all that was written into
    changed_after: set[int] = field(default_factory=set)  # calls of CutPoints whose tensor was written into later
    result: LabelSet = 0  # of what the model returned
    result_objects: list[int] = field(default_factory=list)  # its leaves that are objects with tensors that units made
    training: bool = True
    bypassed: set[str] = field(default_factory=set)  # units in which code between units calls a module
    adds_losses: bool = False  # code between units calls `add_loss`
    draws_idly: bool = False  # Python's or NumPy's random numbers, which decide nothing
    functions: dict[int, str] = field(default_factory=dict)  # by call: the autograd function that calls it

    def in_set(self, labels: LabelSet) -> Iterator[Label]:
        """The labels in a set."""
        while labels:
            low = labels & -labels
            yield self.labels[low.bit_length() - 1]
            labels ^= low

    def call_name(self, call: int) -> str:
        """The unit of a call, by its path, and by number if it was called before: `layers.0`, `layers.0#2`."""
        unit = self.calls[call]
        nth = self.calls[: call + 1].count(unit)
        return self.units[unit] + (f"#{nth}" if nth > 1 else "")

    def is_cut_point(self, call: int) -> bool:
        """Whether it is the call of a CutPoint."""
        return self.calls[call] in self.cut_points

    def cut_name(self, start: int) -> str:
        """The name of a cut: of the CutPoint before this call, or else of the unit that is called."""
        return self.call_name(start - 1 if self.is_cut_point(start - 1) else start)

    def output_of(self, value: Returned) -> Output:
        """The output that contains the value."""
        return self.inner_outputs[value.call, value.inner, value.nth] if value.inner else self.outputs[value.call]

    def value_name(self, value: Returned) -> str:
        """The name of a value that crosses a cut: its module, and its place in what the module returned."""
        name = self.call_name(value.call) + (f".{value.inner}" if value.inner else "")
        if value.nth:
            name += f"#{value.nth + 1}"
        return name if len(self.output_of(value).leaves) == 1 else f"{name}[{value.leaf}]"
