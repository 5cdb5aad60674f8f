"""What transfers hold in a period: points of time in CP-SAT's model of it, and how full a rank is at each of them.

A rank sends from an op's end for as long as the transfer takes, and holds what it receives from the transfer's start
to the end of the op that reads it. Levels rise when ops start and when transfers start, so those points are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ortools.sat.python import cp_model


class Point(NamedTuple):
    """A time, as an offset in the period and a round; both vary."""

    offset: Any
    round: Any


@dataclass(frozen=True)
class Carry:
    """Copies of one transfer: `source` and `target` are nodes, `lag_us` is how long it takes."""

    source: int
    target: int
    num_bytes: int
    lag_us: int
    is_sent: bool  #: by the rank that is looked at, else received


class Level:
    """What a rank holds at a point: terms of CP-SAT, for nodes that do not overlap in the period."""

    def __init__(
        self,
        model: cp_model.CpModel,
        period_us: int,
        nodes: list[int],
        starts: list[Point],
        durations_us: list[int],
        before: dict[tuple[int, int], Any],
        carries: list[Carry],
    ) -> None:
        self.model, self.period_us, self.nodes, self.carries = model, period_us, nodes, carries
        self.starts, self.durations_us, self.before = starts, durations_us, before
        self._points: dict[tuple[int, int], Point] = {}
        self._until: dict[tuple[int, int], Any] = {}

    def all(self, held_bytes: dict[int, int], peak_bytes: dict[int, int]) -> Iterator[Any]:
        """The level at each point where it may be highest."""
        for node in self.nodes:
            if held_bytes[node] > 0 or peak_bytes[node] > 0:
                yield self._at(_AtStart(self, node), held_bytes, peak_bytes)
        for source in sorted({carry.source for carry in self.carries if carry.is_sent}):
            yield self._at(_AtEnd(self, source), held_bytes, peak_bytes)
        for source in sorted({carry.source for carry in self.carries if not carry.is_sent}):
            yield self._at(_Elsewhere(self, source), held_bytes, peak_bytes)

    def _at(self, place: _AtStart | _AtEnd | _Elsewhere, held: dict[int, int], peak: dict[int, int]) -> Any:
        """How often each thing has begun less how often it has ended, by its size."""
        level: Any = 0
        for node in self.nodes:
            if held[node] > 0:
                level += held[node] * place.started(node)
            elif held[node] < 0:
                level += held[node] * place.ended(node)
            if peak[node]:
                level += peak[node] * (place.started(node) - place.ended(node))
        for carry in self.carries:
            if carry.is_sent:
                held_now = place.ended(carry.source) - place.passed(self.later(carry.source, carry.lag_us))
            else:
                held_now = place.passed(self.later(carry.source, 0)) - place.ended(carry.target)
            level += carry.num_bytes * held_now
        return level

    def later(self, node: int, lag_us: int) -> Point:
        """So long after the node's end."""
        key = node, self.durations_us[node] + lag_us
        if key not in self._points:
            start, most = self.starts[node], key[1] // self.period_us + 1
            offset = self.model.new_int_var(0, self.period_us - 1, f"s{key}")
            more = self.model.new_int_var(0, most, f"k{key}")
            self.model.add(offset + self.period_us * more == start.offset + key[1])
            self._points[key] = Point(offset, start.round + more)
        return self._points[key]

    def is_until(self, early: Point, late: Point) -> Any:
        """Whether `early` comes before `late` in the period, or with it."""
        key = id(early), id(late)
        if key not in self._until:
            literal = self.model.new_bool_var("until")
            self.model.add(early.offset <= late.offset).only_enforce_if(literal)
            self.model.add(early.offset > late.offset).only_enforce_if(~literal)
            self._until[key] = literal
        return self._until[key]


@dataclass(frozen=True)
class _AtStart:
    """When `node` starts: what ended until then has ended, and other ops of the rank do not run."""

    level: Level
    node: int

    def started(self, node: int) -> Any:
        return self.ended(node) + (node == self.node)

    def ended(self, node: int) -> Any:
        return (0 if node == self.node else self.level.before[node, self.node]) - self.level.starts[node].round

    def passed(self, point: Point) -> Any:
        return self.level.is_until(point, self.level.starts[self.node]) - point.round


@dataclass(frozen=True)
class _AtEnd:
    """When `node` has ended and what it made is sent. The end may be in the next period: then all has come once less."""

    level: Level
    node: int

    def started(self, node: int) -> Any:
        here, starts = self.level.later(self.node, 0), self.level.starts
        done = 1 if node == self.node else self.level.before[node, self.node]
        return done - starts[node].round - (here.round - starts[self.node].round)

    def ended(self, node: int) -> Any:
        return self.started(node)

    def passed(self, point: Point) -> Any:
        here = self.level.later(self.node, 0)
        return (1 if point is here else self.level.is_until(point, here)) - point.round


@dataclass(frozen=True)
class _Elsewhere:
    """When `node` of another rank has ended and what it made begins to come; the rank may do anything then."""

    level: Level
    node: int

    @property
    def here(self) -> Point:
        return self.level.later(self.node, 0)

    def started(self, node: int) -> Any:
        start = self.level.starts[node]
        return 1 - self.level.is_until(self.here, start) - start.round

    def ended(self, node: int) -> Any:
        return self.passed(self.level.later(node, 0))

    def passed(self, point: Point) -> Any:
        return (1 if point is self.here else self.level.is_until(point, self.here)) - point.round
