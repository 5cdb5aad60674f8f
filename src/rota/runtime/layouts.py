"""Whether a rank knows the layouts of what travels between stages, so that only tensors need to be sent.

Layouts          of one plan: those of its last run, or, with the sizes of its micro-batches, learned ones
KnownLayouts     learned from micro-batches of any size, for all plans of a pipeline
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import combinations_with_replacement
from math import prod
from typing import Any, TypeAlias, final

from torch import nn

from rota.core.programs.actions import ValueKey
from rota.runtime.compute import Batch
from rota.runtime.messages import Format, Layout
from rota.runtime.microbatches import structure
from rota.runtime.precision import ambient_autocast

_INPUTS = "inputs"  # a place in `KnownLayouts`; the others are edges

Size: TypeAlias = tuple[int, ...]  # such as (rows, length)

_MOST_FORMATS = 4096


@final
class Layouts:
    """Whether a rank knows the layouts of a run's messages: those of the last run, or, with `sizes`, learned ones."""

    def __init__(
        self, modules: Sequence[nn.Module], sizes: Sequence[Size], known: KnownLayouts, keys: Iterable[ValueKey]
    ) -> None:
        # `keys`: of the values that other ranks make or read.
        self.formats: dict[ValueKey, Format] = {}
        self.known = known
        self._crossing = sorted({(edge, microbatch) for edge, _, microbatch in keys}) if sizes else []
        self._sizes, self._modules = sizes, modules
        self._parameters = [parameter for module in modules for parameter in module.parameters()]
        self._given: list[Any] = []  # the shapes of the last inputs, and what they held besides tensors
        self._plain: list[Any] = []

    def find(self, batch: Batch) -> tuple[bool, bool]:
        """Whether all layouts are known; and whether what else they depend on is as it was, for all batches."""
        context = (
            [module.training for module in self._modules],
            [parameter.requires_grad for parameter in self._parameters],
            ambient_autocast(),
        )
        is_same_context, self.known.context = context == self.known.context, context
        if self._sizes:
            self._given = [*map(_given, batch.inputs)]
            return self._find_by_sizes(), is_same_context
        plain: list[Any] = []
        given = [structure(value, plain) for value in (batch.inputs[:1] if batch.alike else batch.inputs)]
        is_same = (given, plain) == (self._given, self._plain)
        self._given, self._plain = given, plain
        return is_same and is_same_context, is_same_context

    def _find_by_sizes(self) -> bool:
        """Whether the sizes of the micro-batches tell all layouts; if so, they are in `formats`."""
        for m, given in enumerate(self._given):
            if self.known.layout_at(_INPUTS, self._sizes[m]) != given:
                return False
        for edge, m in self._crossing:
            form = self.known.format_at(edge, self._sizes[m])
            if form is None:
                return False
            self.formats[edge, False, m] = form
        return True

    def learn(self) -> None:
        """Take note of all layouts, after a run with them."""
        if self._sizes:
            for m, given in enumerate(self._given):
                self.known.learn(_INPUTS, self._sizes[m], given)
            for edge, m in self._crossing:
                self.known.learn(edge, self._sizes[m], self.formats[edge, False, m].layout)


def _given(value: Any) -> Any:
    """The shapes of a micro-batch's inputs, and what they hold besides tensors, as `KnownLayouts` compares them."""
    plain: list[Any] = []
    return as_layout(structure(value, plain)), as_layout(plain)


@final
class KnownLayouts:
    """The layouts of one rank's edges, and of its inputs, for micro-batches of any size, learned from other sizes.

    size (rows, length)    seen on an edge                 (4, 64)  →  float32[4, 64, 32]     both ranks of the edge
    (8, 32)                float32[8, 32, 32]              (2, 48)  →  float32[2, 48, 32]     know, without a message

    Each number of a layout is taken to be constant, a multiple of one size or of the product of two, or a size and a
    constant. A layout is known if all that fit what was seen agree on every number of it. The sender checks each value
    that it sends, so a model that does not follow these forms is refused where they first differ, and never silently
    wrong.
    """

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
        form = self._formats.get((place, size))
        if form is None and (layout := self.layout_at(place, size)) is not None:
            if len(self._formats) >= _MOST_FORMATS:
                self._formats = {}
            form = self._formats[place, size] = Format(layout)
        return form

    def layout_at(self, place: Hashable, size: Size) -> Any:
        """What was learned with `learn`, for another size: None if it is not known."""
        rule = self._rules.get(place)
        return None if rule is None else rule.at(size)

    def learn(self, place: Hashable, size: Size, layout: Layout | Any) -> None:
        """Take note of a layout, or of any nested tuples, in which tuples of numbers are shapes."""
        if self._rules.setdefault(place, _Rule()).see(size, layout):
            self._formats = {key: form for key, form in self._formats.items() if key[0] != place}


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
    for i, length in enumerate(size):
        forms.append(((i,), Fraction(number - length), True))
        if length:
            forms.append(((i,), Fraction(number, length), False))
    for i, j in combinations_with_replacement(range(len(size)), 2):
        if size[i] * size[j]:
            forms.append(((i, j), Fraction(number, size[i] * size[j]), False))
    return forms


def _value(form: _Form, size: Sequence[int]) -> Fraction:
    factors, constant, is_sum = form
    product = prod(size[i] for i in factors)
    return product + constant if is_sum else product * constant
