"""The edges between stages: what flows from which stage to which, and in what order stages can run."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

from rota.core.errors import PipelineError, SplitError


class StageEdge(NamedTuple):
    """`target` reads the output of `source`: all of it, or `output[key]`."""

    source: int
    target: int
    key: int | str | None = None

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"

    def take(self, output: Any) -> Any:
        """What of the source's output travels along this edge."""
        if self.key is None:
            return output
        positions = range(len(output)) if isinstance(output, tuple | list) else ()
        keys = [*output] if isinstance(output, dict) else [*positions]
        if self.key in keys:
            return output[self.key]
        raise PipelineError(
            f"edge {self} takes [{self.key!r}] of the output of stage {self.source}, a {type(output).__name__} with "
            f"keys {keys}: return a value under that key there, or change the edge's key"
        )


def parse_edges(edges: Iterable[Sequence[Any]], num_stages: int) -> tuple[StageEdge, ...]:
    """Edges as given, `(source, target)` or `(source, target, key)`, checked: in range, one per pair of stages."""
    parsed: list[StageEdge] = []
    pairs: set[tuple[int, int]] = set()
    for position, ends in enumerate(edges):
        if not 2 <= len(ends) <= 3:
            raise SplitError(f"edges[{position}] is {ends!r}: give (source, target) or (source, target, key)")
        edge = StageEdge(*ends)
        for stage in edge[:2]:
            if not isinstance(stage, int) or not 0 <= stage < num_stages:
                raise SplitError(
                    f"edges[{position}] names stage {stage!r}, but there are {num_stages} stages: "
                    f"use stages 0 to {num_stages - 1}"
                )
        if edge[:2] in pairs:
            raise SplitError(
                f"edges[{position}] is a second edge {edge}: at most one edge joins two stages, "
                "send several values as one tuple or dict"
            )
        pairs.add(edge[:2])
        parsed.append(edge)
    return tuple(parsed)


def topological_order(edges: Sequence[StageEdge], num_stages: int) -> tuple[int, ...]:
    """Stages, each after all that it reads; of those ready, the smallest first. Raises SplitError for a cycle."""
    sorter = TopologicalSorter[int](dict.fromkeys(range(num_stages), ()))
    for edge in edges:
        sorter.add(edge.target, edge.source)
    try:
        sorter.prepare()
    except CycleError as error:
        cycle: list[int] = error.args[1][:-1]
        first = cycle.index(min(cycle))
        around = " -> ".join(map(str, [*cycle[first:], *cycle[: first + 1]]))
        raise SplitError(f"stages wait for each other in a cycle, {around}: remove one of these edges") from None
    ready: list[int] = []
    order: list[int] = []
    while sorter.is_active():
        for stage in sorter.get_ready():
            heapq.heappush(ready, stage)
        order.append(heapq.heappop(ready))
        sorter.done(order[-1])
    return tuple(order)
