"""Figures of micro-batches that differ: a duration or a size is one number, or one number per class of micro-batches.

`PerClass` refuses arithmetic, so that code made for micro-batches that are all alike stops instead of computing with
the wrong number. `each` computes with figures of either form, class by class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from rota.core.errors import PlacementError


class PerClass:
    """A duration or a size that is not the same for all classes of micro-batches. Hashable.

    It stands where an `int` is expected, such as in `Task.duration_us`, and raises TypeError when it is computed with,
    ordered or converted. Read the number of one micro-batch from `Placement.for_microbatch`.

    Attributes:
        values: [num_classes]: the number of each class.

    Raises:
        PlacementError: There is no number.
    """

    __slots__ = ("values",)

    def __init__(self, values: Iterable[int]) -> None:
        self.values = tuple(values)
        if not self.values:
            raise PlacementError("a figure per class of micro-batches has no number; give one per class")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PerClass) and self.values == other.values

    def __hash__(self) -> int:
        return hash(self.values)

    def __repr__(self) -> str:
        return f"PerClass({self.values})"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            f"micro-batches differ: this figure is {self!r}, one number per class; read that of one micro-batch from "
            f"placement.for_microbatch(microbatch), or combine figures with rota.core.figures.each"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse
    __neg__ = __abs__ = __round__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __bool__ = __int__ = __float__ = __index__ = __array__ = __format__ = _refuse


def each(function: Callable[..., int], *figures: int) -> int:
    """`function` of figures, class by class: an int if the result is the same for all classes, else a `PerClass`.

    It is typed as an int, as the figures of tasks and edges are.
    """
    if not any(isinstance(figure, PerClass) for figure in figures):
        return function(*figures)
    rows = [values_of(figure) for figure in figures]
    num_classes = max(map(len, rows))
    columns = (row if len(row) > 1 else row * num_classes for row in rows)
    return same_or_per_class(function(*column) for column in zip(*columns, strict=True))


def same_or_per_class(values: Iterable[int]) -> int:
    """The figure with one number per class: an int where all are the same."""
    given = tuple(values)
    return given[0] if len({*given}) == 1 else PerClass(given)  # type: ignore[return-value]


def as_figure(field: int | tuple[int, ...]) -> int:
    """The figure in JSON that `values_or_number` wrote."""
    return same_or_per_class(field) if isinstance(field, tuple) else field


def values_or_number(figure: int) -> int | tuple[int, ...]:
    """A figure in JSON: a number, or a list with one per class of micro-batches."""
    return figure.values if isinstance(figure, PerClass) else figure


def values_of(figure: int) -> tuple[int, ...]:
    """All numbers of a figure: one, or one per class."""
    given: object = figure
    return given.values if isinstance(given, PerClass) else (figure,)


def value_in(figure: int, class_: int) -> int:
    """A figure's number for one class."""
    return values_of(figure)[class_] if isinstance(figure, PerClass) else figure
