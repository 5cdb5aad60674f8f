"""A graph of nodes with durations and edges with lags: earliest starts, latest ends and the critical path.

These are longest paths in a DAG (Kelley and Walker, "Critical-Path Planning and Scheduling", 1959). An execution order
is a chain of edges with lag 0, so one graph represents data, orders and transfers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, groupby

_UNKNOWN, _WAITS = -1, -2  # instead of an end: not reached yet; on the stack, waiting for another node

Edges = tuple[tuple[int, int], ...]  #: (distance, lag) of each edge of a node


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

    Nodes that are alike, such as the ops of one task, have the same distances and lags. They share one tuple, so that a
    large graph is made quickly, takes little memory and costs the garbage collector nothing.

    Attributes:
        durations_us: Duration of each node.
        edges: For each node (distance, lag) pairs: node i starts `lag` µs after the end of node i - distance, or later.
        previous: For each node one more that it waits for, with lag 0; -1: none. No two nodes have the same one.
    """

    durations_us: Sequence[int]
    edges: Sequence[Edges]
    previous: Sequence[int]

    @classmethod
    def of(cls, durations_us: Sequence[int], inputs: Iterable[Iterable[tuple[int, int]]]) -> TaskGraph:
        """The graph with these (predecessor, lag) pairs of each node."""
        edges = [tuple((node - before, lag) for before, lag in pairs) for node, pairs in enumerate(inputs)]
        return cls(durations_us, edges, [-1] * len(edges))

    def inputs(self, node: int) -> Iterator[tuple[int, int]]:
        """(predecessor, lag) pairs: the node starts `lag` µs after the predecessor's end, or later."""
        for distance, lag in self.edges[node]:
            yield node - distance, lag
        if self.previous[node] >= 0:
            yield self.previous[node], 0

    def earliest(self, guess: Iterable[int] = ()) -> Earliest:
        """Earliest starts and ends, in time linear in nodes and edges.

        Args:
            guess: Nodes in about the order in which they can start, -1 for none. A node whose turn comes too early is
                visited twice.

        Raises:
            CycleError: Nodes wait for each other.
        """
        durations, edges, previous = self.durations_us, self.edges, self.previous
        starts = [0] * len(durations)
        ends = [_UNKNOWN] * len(durations)
        ends.append(0)  # of the node -1, which is previous where there is none
        sequence: list[int] = []
        stack: list[int] = []
        for root in chain(guess, range(len(durations))):
            if ends[root] >= 0:
                continue
            node = root
            while True:  # depth first: visit what `node` still waits for, then return to it
                start = 0
                for distance, lag in edges[node]:
                    before = node - distance
                    end = ends[before]
                    if end < 0:
                        break
                    end += lag
                    if end > start:
                        start = end
                else:
                    before = previous[node]
                    end = ends[before]
                    if end >= 0:
                        if end > start:
                            start = end
                        starts[node] = start
                        ends[node] = start + durations[node]
                        sequence.append(node)
                        if not stack:
                            break
                        node = stack.pop()
                        continue
                ends[node] = _WAITS
                if ends[before] == _WAITS:
                    self._raise_cycle(ends, before)
                stack.append(node)
                node = before
        ends.pop()
        return Earliest(starts, ends, sequence)

    def _raise_cycle(self, ends: list[int], node: int) -> None:
        """Follow inputs that wait from a node on a cycle until the path closes, and raise CycleError."""
        path: list[int] = []
        while node not in path:
            path.append(node)
            node = next(before for before, _ in self.inputs(node) if ends[before] == _WAITS)
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
        durations, readers = self.durations_us, self._readers()
        missing = [len(edges) for edges in self.edges]
        following = [-1] * len(missing)
        for node, before in enumerate(self.previous):
            if before >= 0:
                following[before] = node
                missing[node] += 1
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
            after = following[node]
            if after >= 0:
                if end > starts[after]:
                    starts[after] = end
                missing[after] -= 1
                if not missing[after]:
                    stack.append(after)
            for distance, lag in readers[node]:
                after = node + distance
                ready = end + lag
                if ready > starts[after]:
                    starts[after] = ready
                missing[after] -= 1
                if not missing[after]:
                    stack.append(after)
        if len(sequence) < len(missing):
            return self.earliest()  # which says where the cycle is
        return Earliest(starts, ends, sequence)

    def _readers(self) -> list[Edges]:
        """For each node (distance, lag) pairs: node i + distance waits for node i. Nodes that are alike share them."""
        readers: list[Edges] = [()] * len(self.edges)
        first = 0
        for edges, alike in groupby(self.edges):
            after = first + len([*alike])
            for edge in edges:
                sources = slice(first - edge[0], after - edge[0])
                before = readers[sources]
                if before.count(before[0]) == len(before):
                    readers[sources] = [(*before[0], edge)] * len(before)
                else:
                    readers[sources] = [(*pairs, edge) for pairs in before]
            first = after
        return readers

    def latest_ends(self, earliest: Earliest) -> list[int]:
        """Latest end of each node that does not delay the makespan."""
        makespan = max(earliest.ends_us, default=0)
        latest = [makespan] * len(self.durations_us)
        for node in reversed(earliest.sequence):
            start = latest[node] - self.durations_us[node]
            for before, lag in self.inputs(node):
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
        while starts_us[node] > 0 and (inputs := [*self.inputs(node)]):
            node = max(inputs, key=lambda edge: ends_us[edge[0]] + edge[1])[0]
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
