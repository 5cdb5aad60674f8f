"""Nodes with durations, edges with lags: when each may start, how late it may, and what makes it wait.

Longest paths in a DAG (the critical path method; Kelley and Walker, 1959). An execution order is a chain of edges
with lag 0, so one graph holds data, orders and transfers alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_UNKNOWN, _WAITS = -1, -2  # in place of an end: not reached yet; on the stack, waiting for another node


class CycleError(Exception):
    """`nodes` wait for each other: each one for the next, the last for the first."""

    def __init__(self, nodes: list[int]) -> None:
        super().__init__(f"{len(nodes)} nodes wait for each other: {nodes}")
        self.nodes = nodes


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """Node i lasts `durations_us[i]`; it starts `lag` after the end of p for each (p, lag) in `inputs[i]`."""

    durations_us: Sequence[int]
    inputs: Sequence[Sequence[tuple[int, int]]]

    def earliest(self) -> Earliest:
        """Earliest starts, linear in nodes and edges. Raises CycleError."""
        durations, inputs = self.durations_us, self.inputs
        starts = [0] * len(durations)
        ends = [_UNKNOWN] * len(durations)
        sequence: list[int] = []
        stack: list[int] = []
        for root in range(len(durations)):
            if ends[root] >= 0:
                continue
            node = root
            while True:  # depth first: go to what `node` still waits for, come back when it is known
                start = 0
                for before, lag in inputs[node]:
                    end = ends[before]
                    if end < 0:
                        break
                    end += lag
                    if end > start:
                        start = end
                else:
                    starts[node] = start
                    ends[node] = start + durations[node]
                    sequence.append(node)
                    if not stack:
                        break
                    node = stack.pop()
                    continue
                if ends[before] == _WAITS:
                    self._raise_cycle(ends, before)
                ends[node] = _WAITS
                stack.append(node)
                node = before
        return Earliest(starts, ends, sequence)

    def _raise_cycle(self, ends: list[int], node: int) -> None:
        """Walk from a node on a cycle to the first unknown input, again and again, until it closes."""
        path: list[int] = []
        while node not in path:
            path.append(node)
            node = next(before for before, _ in self.inputs[node] if ends[before] < 0)
        raise CycleError(path[path.index(node) :])

    def latest_ends(self, earliest: Earliest) -> list[int]:
        """How late each node may end without moving the last end of all."""
        makespan = max(earliest.ends_us, default=0)
        latest = [makespan] * len(self.durations_us)
        for node in reversed(earliest.sequence):
            start = latest[node] - self.durations_us[node]
            for before, lag in self.inputs[node]:
                latest[before] = min(latest[before], start - lag)
        return latest

    def slack_us(self, earliest: Earliest) -> list[int]:
        """How much each node may be delayed alone; 0 on every critical path."""
        return [late - end for late, end in zip(self.latest_ends(earliest), earliest.ends_us, strict=True)]

    def critical_path(self, starts_us: Sequence[int], ends_us: Sequence[int]) -> list[int]:
        """The chain of nodes that made the last end as late as it was, for these starts and ends.

        From the node that ends last, each step goes back to the input that arrived last. With earliest starts the
        chain begins at 0 and has no gaps, so durations and lags on it add up to the makespan.
        """
        if not ends_us:
            return []
        node = max(range(len(ends_us)), key=ends_us.__getitem__)
        path = [node]
        while self.inputs[node] and starts_us[node] > 0:
            node = max(self.inputs[node], key=lambda edge: ends_us[edge[0]] + edge[1])[0]
            path.append(node)
        return path[::-1]


@dataclass(frozen=True, slots=True)
class Earliest:
    """`sequence` lists the nodes so that each comes after all that it waits for."""

    starts_us: list[int]
    ends_us: list[int]
    sequence: list[int]
