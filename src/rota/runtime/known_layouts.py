"""What travels between stages for a micro-batch of any size, learned from micro-batches of other sizes.

    size (rows, length)    seen on an edge                 (4, 64)  →  float32[4, 64, 32]     both ranks of the edge
    (8, 32)                float32[8, 32, 32]              (2, 48)  →  float32[2, 48, 32]     know, without a message

Each number of a layout is taken to be constant, a multiple of one size or of the product of two, or a size and a
constant. A layout is known if all that fit what was seen agree on every number of it. The sender checks each value that
it sends, so a model that does not follow these forms is refused where they first differ, and never silently wrong.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from fractions import Fraction
from itertools import combinations_with_replacement
from math import prod
from typing import Any, TypeAlias, final

from rota.runtime.messages import Format, Layout

Size: TypeAlias = tuple[int, ...]  # such as (rows, length)

_MOST_FORMATS = 4096


@final
class KnownLayouts:
    """The layouts of one rank's edges, and of the inputs that it reads, by the size of a micro-batch."""

    def __init__(self) -> None:
        #: Whatever else the layouts may depend on; None: it is not known any more.
        self.context: object = None
        self._rules: dict[Hashable, _Rule] = {}
        self._formats: dict[tuple[Hashable, Size], Format] = {}

    def forget(self) -> None:
        """Forget all layouts."""
        self._rules, self._formats = {}, {}

    def format_at(self, place: Hashable, size: Size) -> Format | None:
        """The format of an edge's values, None if it is not known."""
        found = self._formats.get((place, size))
        if found is None and (layout := self.layout_at(place, size)) is not None:
            if len(self._formats) >= _MOST_FORMATS:
                self._formats = {}
            found = self._formats[place, size] = Format(layout)
        return found

    def layout_at(self, place: Hashable, size: Size) -> Any:
        """What was learned with `learn`, for another size: None if it is not known."""
        rule = self._rules.get(place)
        return None if rule is None else rule.at(size)

    def learn(self, place: Hashable, size: Size, layout: Layout | Any) -> None:
        """Take note of a layout, or of any nested tuples, in which tuples of numbers are shapes."""
        if self._rules.setdefault(place, _Rule()).see(size, layout):
            self._formats = {key: found for key, found in self._formats.items() if key[0] != place}


def as_layout(value: Any) -> Any:
    """Nested lists and dicts as nested tuples, whole numbers in them as in a layout."""
    if isinstance(value, dict):
        return tuple((key, as_layout(item)) for key, item in value.items())
    if isinstance(value, list):
        return tuple(map(as_layout, value))
    return ("value", value, "int") if type(value) is int else value


def _taken_apart(value: Any, numbers: list[int]) -> Any:
    """The value with the numbers of its shapes, and whole numbers sent as such, replaced by None, and in `numbers`."""
    if not isinstance(value, tuple):
        return value
    if value and all(type(item) is int for item in value):
        numbers += value
        return (None,) * len(value)
    if len(value) == 3 and value[0] == "value" and type(value[1]) is int:
        numbers.append(value[1])
        return _WHOLE_NUMBER
    return tuple(_taken_apart(item, numbers) for item in value)


_WHOLE_NUMBER = ("value", (None,), "int")


def _joined(frame: Any, numbers: Iterator[int]) -> Any:
    """What `_taken_apart` took apart."""
    if not isinstance(frame, tuple):
        return frame
    if frame == _WHOLE_NUMBER:
        return "value", next(numbers), "int"
    if frame and all(item is None for item in frame):
        return tuple(next(numbers) for _ in frame)
    return tuple(_joined(item, numbers) for item in frame)


# The sizes with these positions, their product times the constant, or plus the constant if it is a sum.
_Form: TypeAlias = tuple[tuple[int, ...], Fraction, bool]


@final
class _Rule:
    """What was seen at one place, and for each number of it the forms that fit all of that."""

    def __init__(self) -> None:
        self._seen: dict[Size, Any] = {}
        self._frame: Any = None
        self._forms: list[list[_Form]] | None = None  # None: nothing was seen, or it differs in more than numbers

    def see(self, size: Size, layout: Any) -> bool:
        """Whether this says something new."""
        if size in self._seen and self._seen[size] == layout:
            return False
        numbers: list[int] = []
        frame, is_first = _taken_apart(layout, numbers), not self._seen
        self._seen[size] = layout
        if is_first:
            self._frame, self._forms = frame, [_forms_of(size, number) for number in numbers]
        elif self._forms is not None and frame == self._frame and len(size) == len(next(iter(self._seen))):
            pairs = zip(self._forms, numbers, strict=True)
            self._forms = [[form for form in forms if _value(form, size) == number] for forms, number in pairs]
        else:
            self._forms = None
        return True

    def at(self, size: Size) -> Any:
        """The layout of a micro-batch of this size, None if it is not known."""
        if size in self._seen or self._forms is None:
            return self._seen.get(size)
        numbers = []
        for forms in self._forms:
            values = {_value(form, size) for form in forms}
            if len(values) != 1 or (value := values.pop()).denominator != 1 or value < 0:
                return None
            numbers.append(int(value))
        return _joined(self._frame, iter(numbers))


def _forms_of(size: Size, number: int) -> list[_Form]:
    """All forms that give `number` at `size`."""
    forms: list[_Form] = [((), Fraction(number), False)]
    for i, known in enumerate(size):
        forms.append(((i,), Fraction(number - known), True))
        if known:
            forms.append(((i,), Fraction(number, known), False))
    for i, j in combinations_with_replacement(range(len(size)), 2):
        if size[i] * size[j]:
            forms.append(((i, j), Fraction(number, size[i] * size[j]), False))
    return forms


def _value(form: _Form, size: Sequence[int]) -> Fraction:
    factors, constant, is_sum = form
    product = prod(size[i] for i in factors)
    return product + constant if is_sum else product * constant
