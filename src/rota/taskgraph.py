"""A graph of nodes with durations and edges with lags: earliest starts, latest ends and the critical path.

These are longest paths in a DAG (Kelley and Walker, "Critical-Path Planning and Scheduling", 1959). An execution order
is a chain of edges with lag 0, so one graph represents data, orders and transfers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate

_UNKNOWN, _WAITS = -1, -2  # instead of an end: not reached yet; on the stack, waiting for another node


class CycleError(Exception):
    """Nodes wait for each other.

    Attributes:
        nodes: The cycle: each node waits for the next, the last one for the first.
    """

    def __init__(self, nodes: list[int]) -> None:
        super().__init__(f"{len(nodes)} nodes wait for each other: {nodes}")
        self.nodes = nodes


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """A graph of n nodes.

    Attributes:
        durations_us: Duration of each node.
        inputs: For each node its (predecessor, lag) pairs: it starts `lag` µs after the predecessor's end, or later.
    """

    durations_us: Sequence[int]
    inputs: Sequence[Sequence[tuple[int, int]]]

    def earliest(self) -> Earliest:
        """Earliest starts and ends, in time linear in nodes and edges. Raises CycleError."""
        durations, inputs = self.durations_us, self.inputs
        starts = [0] * len(durations)
        ends = [_UNKNOWN] * len(durations)
        sequence: list[int] = []
        stack: list[int] = []
        for root in range(len(durations)):
            if ends[root] >= 0:
                continue
            node = root
            while True:  # depth first: visit what `node` still waits for, then return to it
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
        """Follow first unknown inputs from a node on a cycle until the path closes, and raise CycleError."""
        path: list[int] = []
        while node not in path:
            path.append(node)
            node = next(before for before, _ in self.inputs[node] if ends[before] < 0)
        raise CycleError(path[path.index(node) :])

    def first_come(self, served: Mapping[int, Sequence[int]]) -> Earliest:
        """Earliest starts and ends where some nodes share servers, which take first what is ready first.

        Of nodes that are ready at once the lowest is served first. A server serves one node at a time; a node with
        several servers occupies all of them.

        Args:
            served: The servers of each node that has any.

        Raises:
            CycleError: Nodes wait for each other, servers left aside.
        """
        durations = self.durations_us
        first, readers, lags = self._outputs()
        missing = [len(before) for before in self.inputs]
        starts, ends = [0] * len(missing), [_UNKNOWN] * len(missing)
        free = dict.fromkeys((server for servers in served.values() for server in servers), 0)
        sequence: list[int] = []
        queue: list[tuple[int, int]] = []  # (ready, node) of what waits to be served
        stack = [node for node, count in enumerate(missing) if not count]
        while stack or queue:
            if stack:
                node = stack.pop()
                start = starts[node]
                if node in served:
                    heappush(queue, (start, node))
                    continue
                end = start + durations[node]
            else:  # everything that could be ready before is in the queue, because nodes end after what they wait for
                start, node = heappop(queue)
                for server in served[node]:
                    if free[server] > start:
                        start = free[server]
                starts[node], end = start, start + durations[node]
                for server in served[node]:
                    free[server] = end
            ends[node] = end
            sequence.append(node)
            for i in range(first[node], first[node + 1]):
                after = readers[i]
                ready = end + lags[i]
                if ready > starts[after]:
                    starts[after] = ready
                missing[after] -= 1
                if not missing[after]:
                    stack.append(after)
        if len(sequence) < len(missing):
            return self.earliest()  # which says where the cycle is
        return Earliest(starts, ends, sequence)

    def _outputs(self) -> tuple[list[int], list[int], list[int]]:
        """What waits for each node, in three flat lists, as a list per node costs the garbage collector far more.

        Those that wait for node i, and their lags, are at the positions from `first[i]` to `first[i + 1]`.
        """
        num_outputs = [0] * len(self.inputs)
        for inputs in self.inputs:
            for before, _ in inputs:
                num_outputs[before] += 1
        first = [0, *accumulate(num_outputs)]
        readers, lags, free = [0] * first[-1], [0] * first[-1], first[:]
        for node, inputs in enumerate(self.inputs):
            for before, lag in inputs:
                i = free[before]
                readers[i], lags[i], free[before] = node, lag, i + 1
        return first, readers, lags

    def latest_ends(self, earliest: Earliest) -> list[int]:
        """Latest end of each node that does not delay the makespan."""
        makespan = max(earliest.ends_us, default=0)
        latest = [makespan] * len(self.durations_us)
        for node in reversed(earliest.sequence):
            start = latest[node] - self.durations_us[node]
            for before, lag in self.inputs[node]:
                latest[before] = min(latest[before], start - lag)
        return latest

    def critical_path(self, starts_us: Sequence[int], ends_us: Sequence[int]) -> list[int]:
        """The chain of nodes that determined the last end, for given starts and ends.

        From the node that ends last, each step goes back to the input that arrived last. With earliest starts the
        chain begins at 0 and has no gaps, so its durations and lags add up to the makespan.

        Args:
            starts_us: Start of each node.
            ends_us: End of each node.

        Returns:
            The nodes of the chain, first to last; empty for an empty graph.
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
    """Earliest times of a graph's nodes.

    Attributes:
        starts_us: Earliest start of each node.
        ends_us: Earliest end of each node.
        sequence: The nodes in a topological order: each comes after all that it waits for.
    """

    starts_us: list[int]
    ends_us: list[int]
    sequence: list[int]
