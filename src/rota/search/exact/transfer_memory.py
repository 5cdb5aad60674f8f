"""What transfers hold: points of time in a CP-SAT model of a period or of a whole step, and a rank's level at each.

A rank holds what it sends from the op's end for as long as the transfer lasts, and what it receives from the transfer's
start to the end of the op that reads it. Levels rise only when ops start, when ops hand over what they send, and when
transfers start, so only these points count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ortools.sat.python import cp_model

from rota.core.stopping import look
from rota.search.lowering import Carried, Instant

_S_PER_LITERAL = 1e-4  # nominal seconds per literal


class TimePoint(NamedTuple):
    """A time, as an offset in the period in µs and a round; both are variables. A whole step has one round."""

    offset: Any
    round: Any


@dataclass(frozen=True)
class Times:
    """A model's variables.

    `ends(node, lag_us)`: `lag_us` after the node's end; `before(a, b)`: both on one rank; `is_until(early, late)`:
    whether a point comes before another one in the period, or at the same time; `duration_us(node)`: how long it lasts.
    """

    model: cp_model.CpModel
    starts: Mapping[int, TimePoint]
    ends: Callable[[int, int], TimePoint]
    before: Callable[[int, int], Any]
    is_until: Callable[[TimePoint, TimePoint], Any]
    duration_us: Callable[[int], int]


class PointOrder:
    """Literals that say which of two points comes first in the period."""

    def __init__(self, model: cp_model.CpModel) -> None:
        self.model = model
        self._until: dict[tuple[int, int], tuple[cp_model.IntVar, TimePoint, TimePoint]] = {}  # points keep their ids

    @property
    def nominal_s(self) -> float:
        """Nominal seconds that it costs to make the literals, and the levels that count them."""
        return _S_PER_LITERAL * len(self._until)

    def is_until(self, early: TimePoint, late: TimePoint) -> cp_model.IntVar:
        """Whether `early` comes before `late` in the period, or at the same time."""
        key = id(early), id(late)
        if key not in self._until:
            literal = self.model.new_bool_var("until")
            self.model.add(early.offset <= late.offset).only_enforce_if(literal)
            self.model.add(early.offset > late.offset).only_enforce_if(~literal)
            self._until[key] = literal, early, late
        return self._until[key][0]


class Level:
    """What a rank holds at a point of time: CP-SAT terms, for nodes that do not overlap."""

    def __init__(self, times: Times, nodes: Sequence[int], carries: Sequence[Carried]) -> None:
        self.nodes, self.carries = nodes, carries
        self.times, self.starts, self.before = times, times.starts, times.before
        self._points: dict[tuple[int, int], TimePoint] = {}

    def all(self, held_bytes: Mapping[int, int], peak_bytes: Mapping[int, int]) -> Iterator[Any]:
        """The level at each point where it may be highest."""
        for node in self.nodes:
            if held_bytes[node] > 0 or peak_bytes[node] > 0:
                yield self._at(_AtStart(self, node), held_bytes, peak_bytes)
        for since, is_sent in sorted({(carry.since, carry.is_sent) for carry in self.carries}):
            follows = is_sent and self.times.duration_us(since.op) > 0
            yield self._at(_AtEnd(self, since.op) if follows else _Elsewhere(self, since), held_bytes, peak_bytes)

    def _at(self, place: _AtStart | _AtEnd | _Elsewhere, held: Mapping[int, int], peak: Mapping[int, int]) -> Any:
        """How often each thing has begun less how often it has ended, by its size."""
        look()
        level: Any = 0
        for node in self.nodes:
            if held[node] > 0:
                level += held[node] * place.started(node)
            elif held[node] < 0:
                level += held[node] * place.ended(node)
            if peak[node]:
                level += peak[node] * (place.started(node) - place.ended(node))
        for carry in self.carries:
            node, since, until = carry.since.op, carry.since, carry.until
            follows = carry.is_sent and self.times.duration_us(node) > 0
            begun = place.ended(node) if follows else place.passed(self.later(*since))
            over = place.passed(self.later(*until)) if carry.is_sent else place.ended(until.op)
            level += carry.num_bytes * (begun - over)
        return level

    def later(self, node: int, lag_us: int) -> TimePoint:
        """The point `lag_us` after the node's end."""
        if (node, lag_us) not in self._points:
            self._points[node, lag_us] = self.times.ends(node, lag_us)
        return self._points[node, lag_us]


@dataclass(frozen=True)
class _AtStart:
    """The point where the op of `node` starts: earlier ops of the rank have ended, and no other op of it runs."""

    level: Level
    node: int

    def started(self, node: int) -> Any:
        return self.ended(node) + (node == self.node)

    def ended(self, node: int) -> Any:
        return (0 if node == self.node else self.level.before(node, self.node)) - self.level.starts[node].round

    def passed(self, point: TimePoint) -> Any:
        return self.level.times.is_until(point, self.level.starts[self.node]) - point.round


@dataclass(frozen=True)
class _AtEnd:
    """The point where `node` has ended and its result is sent. In the next period, everything has come once less."""

    level: Level
    node: int

    def started(self, node: int) -> Any:
        end, starts = self.level.later(self.node, 0), self.level.starts
        done = 1 if node == self.node else self.level.before(node, self.node)
        return done - starts[node].round - (end.round - starts[self.node].round)

    ended = started

    def passed(self, point: TimePoint) -> Any:
        end = self.level.later(self.node, 0)
        return (1 if point is end else self.level.times.is_until(point, end)) - point.round


@dataclass(frozen=True)
class _Elsewhere:
    """The point where a transfer starts, or is handed over by an op of no duration.

    The rank may do anything then. At one instant, transfers start before ops do.
    """

    level: Level
    since: Instant

    @property
    def instant(self) -> TimePoint:
        return self.level.later(*self.since)

    def started(self, node: int) -> Any:
        start = self.level.starts[node]
        return 1 - self.level.times.is_until(self.instant, start) - start.round

    def ended(self, node: int) -> Any:
        end = self.level.later(node, 0)
        if self.level.times.duration_us(node):
            return self.passed(end)
        return 1 - self.level.times.is_until(self.instant, end) - end.round  # at one instant, transfers start first

    def passed(self, point: TimePoint) -> Any:
        return (1 if point is self.instant else self.level.times.is_until(point, self.instant)) - point.round
