"""The exact least period of fixed orders: the largest ratio of time to rounds over all cycles of waits.

A node on a cycle waits for an earlier micro-batch of itself, so a period lasts at least the cycle's time divided by its
rounds; and the largest of these ratios is enough (Reiter, 1968). It is found from below, as by Newton's method: the
starts that a period allows are longest paths; where a cycle has no longest path, the period rises to the cycle's ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import TopologicalSorter
from itertools import chain
from typing import NamedTuple

import numpy as np

from rota.compiled import loop
from rota.core.stopping import look
from rota.search.problem import Integers

_DONE, _RISING = -1, -2  #: what `_raise_starts` answers, besides a node
_ARCS_AT_ONCE = 5_000_000  # of the compiled loop, which cannot be interrupted


class Wait(NamedTuple):
    """`target` starts at least `least_us` after `source` did `rounds` periods earlier."""

    source: int
    target: int
    least_us: int
    rounds: int


class Rhythm(NamedTuple):
    """Node i starts at `starts_us[i]` and every period later; `ties[i]`: its place among those that start with it."""

    period_us: int
    starts_us: tuple[int, ...]
    ties: tuple[int, ...]


def retime(num_nodes: int, waits: Sequence[Wait], at_least_us: int = 1) -> Rhythm | None:
    """The least period from `at_least_us` on, with the earliest starts; None if no period is long enough."""
    period_us = at_least_us
    table = np.fromiter(chain.from_iterable(waits), np.int64, 4 * len(waits)).reshape(-1, 4)
    while True:
        starts, cycle = _longest_paths(num_nodes, waits, table, period_us)
        if not cycle:
            return Rhythm(period_us, tuple(starts), _ties(num_nodes, waits, period_us, starts))
        rounds = sum(wait.rounds for wait in cycle)
        if rounds <= 0:
            return None
        period_us = -(-sum(wait.least_us for wait in cycle) // rounds)


def _longest_paths(
    num_nodes: int, waits: Sequence[Wait], table: Integers, period_us: int
) -> tuple[list[int], list[Wait]]:
    """(earliest starts, all 0 or more; a cycle on which they would rise forever, or nothing): Bellman and Ford."""
    sources, targets, least_us = table[:, 0].copy(), table[:, 1].copy(), table[:, 2] - period_us * table[:, 3]
    starts, last = np.zeros(num_nodes, np.int64), np.full(num_nodes, -1)
    sweeps = max(1, _ARCS_AT_ONCE // max(1, len(waits)))
    while True:
        look()
        answer = int(_raise_starts(sources, targets, least_us, starts, last, sweeps))
        if answer != _RISING:
            break
    return starts.tolist(), [] if answer == _DONE else _cycle_at(waits, last.tolist(), answer)


def _cycle_at(waits: Sequence[Wait], last: Sequence[int], node: int) -> list[Wait]:
    """The waits of the cycle that a node is on; `last[node]` is the wait that made a node as late as it is."""
    cycle = [waits[last[node]]]
    while cycle[-1].source != node:
        cycle.append(waits[last[cycle[-1].source]])
    return cycle


@loop
def _raise_starts(
    sources: Integers, targets: Integers, least_us: Integers, starts: Integers, last: Integers, sweeps: int
) -> int:
    """Makes starts later until nothing waits any more (_DONE); a node on a cycle, or _RISING after so many sweeps."""
    seen = np.empty(len(starts), np.int64)
    for _ in range(sweeps):
        rising = False
        for i in range(len(sources)):
            if starts[sources[i]] + least_us[i] > starts[targets[i]]:
                starts[targets[i]] = starts[sources[i]] + least_us[i]
                last[targets[i]] = i
                rising = True
        if not rising:
            return _DONE
        for node in range(len(seen)):
            seen[node] = -1
        for first in range(len(seen)):
            node = first
            while seen[node] < 0:
                seen[node] = first
                if last[node] < 0:
                    break
                node = sources[last[node]]
                if seen[node] == first:
                    return node
    return _RISING


def _ties(num_nodes: int, waits: Sequence[Wait], period_us: int, starts: Sequence[int]) -> tuple[int, ...]:
    """Places in an order in which a node that waits for another one at the same instant comes after it."""
    before: dict[int, set[int]] = {node: set() for node in range(num_nodes)}
    for source, target, least, rounds in waits:
        if least == 0 and starts[target] == starts[source] - period_us * rounds:
            before[target].add(source)
    places = [0] * num_nodes
    for place, node in enumerate(TopologicalSorter(before).static_order()):
        places[node] = place
    return tuple(places)
