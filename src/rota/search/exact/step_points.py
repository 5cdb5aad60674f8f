"""Points of time in the CP-SAT model of a whole step, and what is known about which of two comes first.

Points are tied to ops, so much about two of them follows from the ops: data and time decide many pairs, and the order
of two ops of a rank decides others. Of points that return with each micro-batch, the earlier micro-batch's comes first.
CP-SAT by itself would find most of this only by trying.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rota.search.exact.ordering import Ordering
from rota.search.exact.transfer_memory import PointOrder, TimePoint
from rota.search.problem import Integers


class _Place(NamedTuple):
    """`ticks` after the start of a node."""

    node: int
    ticks: int


class Gaps:
    """What separates the starts of two nodes in every order that is left."""

    def __init__(self, ordering: Ordering) -> None:
        certain, window = ordering.certain, ordering.window
        self._index = {node: i for i, node in enumerate(window.sequence)}
        heads = np.array([certain.heads[node] for node in window.sequence])
        latest = np.array([certain.most - certain.tails[n] - window.lengths[n] for n in window.sequence])
        gaps: Integers = heads[None, :] - latest[:, None]
        np.fill_diagonal(gaps, 0)
        for a, b, lag in certain.edges:
            i, j = self._index[a], self._index[b]
            gaps[i, j] = max(gaps[i, j], window.lengths[a] + lag)
        for i in range(len(gaps)):  # where no order is left, a cycle would double them each time
            np.maximum(gaps, np.minimum(gaps[:, i, None] + gaps[None, i, :], certain.most + 1), out=gaps)
        self._gaps: list[list[int]] = gaps.tolist()

    def least(self, a: int, b: int) -> int:
        """The least ticks from the start of `a` to the start of `b`; less than 0 where `b` may start before `a`."""
        return self._gaps[self._index[a]][self._index[b]]


class StepPoints:
    """Makes points, and literals for which of two comes first where that is not known."""

    def __init__(self, ordering: Ordering, gaps: Gaps, most_us: int) -> None:
        self.ordering, self.gaps, self.most_us = ordering, gaps, most_us
        self._order = PointOrder(ordering.model)
        self._points: dict[_Place, TimePoint] = {}
        self._places: dict[int, _Place] = {}  # by the id of the point
        self._literals: dict[tuple[_Place, _Place], Any] = {}

    def start(self, node: int) -> TimePoint:
        """The start of a node."""
        return self._point(_Place(node, 0))

    def end(self, node: int, lag_us: int) -> TimePoint:
        """`lag_us` after the end of a node."""
        ordering = self.ordering
        return self._point(_Place(node, ordering.window.lengths[node] + lag_us * ordering.ticks))

    def is_until(self, early: TimePoint, late: TimePoint) -> Any:
        """Whether `early` comes before `late`, or at the same time."""
        places = self._places[id(early)], self._places[id(late)]
        if places not in self._literals:
            order = self._known(*places)
            self._literals[places] = self._order.is_until(early, late) if order is None else int(order)
        return self._literals[places]

    def add_implications(self) -> None:
        """What the literals say about each other, and about the order of two ops of a rank."""
        model, window = self.ordering.model, self.ordering.window
        literals = {places: literal for places, literal in self._literals.items() if not isinstance(literal, int)}
        for (early, late), literal in literals.items():
            sooner = early._replace(node=early.node - 1), late
            later = early, late._replace(node=late.node + 1)
            for pair, (a, b) in ((sooner, (early.node - 1, early.node)), (later, (late.node, late.node + 1))):
                implied = literals.get(pair)
                if implied is not None and window.task_of[a] == window.task_of[b]:
                    model.add_implication(literal, implied)
            self._relate(literal, early, late)

    def _relate(self, literal: Any, early: _Place, late: _Place) -> None:
        """Two ops of one rank do not overlap: their order may decide that of the points, or the other way round."""
        ordering, a, b = self.ordering, early.node, late.node
        order = ordering.order_of(a, b)
        if order is None:
            return
        apart = late.ticks - early.ticks
        if ordering.window.lengths[a] + apart >= 0:  # where a comes first, its point does too
            ordering.model.add_implication(order, literal)
        if ordering.window.lengths[b] - apart >= ordering.ticks:
            ordering.model.add_implication(~order, ~literal)

    def _point(self, place: _Place) -> TimePoint:
        if place not in self._points:
            point = TimePoint(self._us(place), 0)
            self._points[place], self._places[id(point)] = point, place
        return self._points[place]

    def _us(self, place: _Place) -> Any:
        """The time of a place in whole µs."""
        model, ticks = self.ordering.model, self.ordering.ticks
        time = self.ordering.starts[place.node] + place.ticks
        if ticks == 1:
            return time
        us = model.new_int_var(0, self.most_us, "us")
        model.add_linear_constraint(time - ticks * us, 0, ticks - 1)
        return us

    def _known(self, early: _Place, late: _Place) -> bool | None:
        """Whether `early` comes first, if that is known."""
        apart = late.ticks - early.ticks
        if self.gaps.least(early.node, late.node) + apart >= 0:
            return True
        return False if self.gaps.least(late.node, early.node) - apart >= self.ordering.ticks else None
