"""The exact least period of fixed orders: the largest ratio of time to rounds over all cycles of waits.

A node on a cycle waits for an earlier micro-batch of itself, so a period lasts at least the cycle's time divided by its
rounds; and the largest of these ratios is enough (Reiter, 1968). It is found from below, as by Newton's method: the
starts that a period allows are longest paths; where a cycle has no longest path, the period rises to the cycle's ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import TopologicalSorter
from typing import NamedTuple

from rota.stopping import look


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
    while True:
        starts, cycle = _longest_paths(num_nodes, waits, period_us)
        if not cycle:
            return Rhythm(period_us, tuple(starts), _ties(num_nodes, waits, period_us, starts))
        rounds = sum(wait.rounds for wait in cycle)
        if rounds <= 0:
            return None
        period_us = -(-sum(wait.least_us for wait in cycle) // rounds)


def _longest_paths(num_nodes: int, waits: Sequence[Wait], period_us: int) -> tuple[list[int], list[Wait]]:
    """(earliest starts, all 0 or more; a cycle on which they would rise forever, or nothing): Bellman and Ford."""
    starts = [0] * num_nodes
    last: list[Wait | None] = [None] * num_nodes
    arcs = [(wait.source, wait.target, wait.least_us - period_us * wait.rounds, wait) for wait in waits]
    rising = True
    while rising:
        look()
        rising = False
        for source, target, least, wait in arcs:
            if starts[source] + least > starts[target]:
                starts[target] = starts[source] + least
                last[target] = wait
                rising = True
        if rising and (cycle := _cycle(last)):
            return starts, cycle
    return starts, []


def _cycle(last: Sequence[Wait | None]) -> list[Wait]:
    """A cycle among the waits that made each node as late as it is; empty without one."""
    seen = [-1] * len(last)
    for first in range(len(last)):
        node = first
        while seen[node] < 0:
            seen[node] = first
            wait = last[node]
            if wait is None:
                break
            node = wait.source
        else:
            if seen[node] == first:
                return _walk(last, node)
    return []


def _walk(last: Sequence[Wait | None], node: int) -> list[Wait]:
    cycle: list[Wait] = []
    while not cycle or cycle[-1].source != node:
        wait = last[cycle[-1].source if cycle else node]
        assert wait is not None, "the walk follows a cycle"
        cycle.append(wait)
    return cycle


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
