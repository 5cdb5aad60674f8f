"""Some ops of a step that are to be re-ordered, and what is certain about their order before any search.

From heads and tails: an op that cannot come after another one in time comes before it (Carlier and Pinson, "An
algorithm for solving the job-shop problem", 1989). From memory: an op that takes what is not free yet comes after ops
that free it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from rota.search.critical_path import CriticalPath
from rota.search.problem import NO_LIMIT
from rota.stopping import look

_MOST_ROUNDS = 8  # of deduction; what was found by then holds


@dataclass(frozen=True)
class StepEndTimes:
    """A stage's reduction on a rank, which follows the last of its `gradients` (nodes of the window)."""

    gradients: tuple[int, ...]
    reduce_us: int


@dataclass(frozen=True)
class Window:
    """The ops that are re-ordered. Every path between two nodes of the window stays within it. Times are in ticks."""

    critical_path: CriticalPath
    sequence: tuple[int, ...]  #: all nodes, each after those that it waits for in `rows`
    rows: tuple[tuple[int, ...], ...]  #: per rank, nodes next to each other in the rank's order
    is_free: tuple[bool, ...]  #: per rank; where it is not set, the rank's order stays
    levels_bytes: tuple[int, ...]  #: per rank, what it holds before the window
    heads: Mapping[int, int]  #: per node: it starts no earlier
    tails: Mapping[int, int]  #: per node: what follows its end
    #: Per rank, the step ends whose last gradients are in the window, and the µs of what follows them: later
    #: reductions, and all optimizer steps.
    step_ends: tuple[tuple[tuple[StepEndTimes, ...], int], ...]

    @cached_property
    def task_of(self) -> dict[int, int]:
        """The task of each node."""
        return dict(zip(self.sequence, self.critical_path.problem.task_of[list(self.sequence)].tolist(), strict=True))

    @cached_property
    def lengths(self) -> dict[int, int]:
        """Duration of each node in ticks."""
        lengths: list[int] = self.critical_path.lengths.tolist()
        return {node: lengths[task] for node, task in self.task_of.items()}

    @cached_property
    def nodes_of(self) -> dict[int, range]:
        """The nodes of each task, which are consecutive numbers."""
        nodes: dict[int, range] = {}
        for node in sorted(self.task_of):
            task = self.task_of[node]
            nodes[task] = range(nodes[task].start if task in nodes else node, node + 1)
        return nodes

    @cached_property
    def tasks_on(self) -> list[list[int]]:
        """The tasks of each rank, in the order of their first nodes."""
        return [list(dict.fromkeys(self.task_of[node] for node in row)) for row in self.rows]

    @cached_property
    def edges(self) -> list[tuple[int, int, int]]:
        """(node, node, lag in ticks) for data, for a task's micro-batches, and for ranks whose order stays."""
        problem = self.critical_path.problem
        edges = []
        for (source, target), lag in problem.lags_us.items():
            if source in self.nodes_of and target in self.nodes_of:
                shift = int(problem.first_node[target] - problem.first_node[source])
                others = self.nodes_of[target]
                nodes = (node for node in self.nodes_of[source] if node + shift in others)
                edges += [(node, node + shift, lag * self.critical_path.ticks) for node in nodes]
        for nodes_ in self.nodes_of.values():
            edges += [(a, b, 0) for a, b in pairwise(nodes_)]
        for row, is_free in zip(self.rows, self.is_free, strict=True):
            if not is_free:
                edges += [(a, b, 0) for a, b in pairwise(row)]
        return edges


class Certain:
    """What must hold if the end of every node plus its tail is at most `most` ticks.

    Attributes:
        is_impossible: Nothing can hold it.
        sure: For tasks c and x of one rank, all nodes of c below `sure[c, x][j]` come before x's j-th node.
        heads: Those of the window, raised.
        tails: Those of the window, raised.
    """

    def __init__(self, window: Window, most: int) -> None:
        self.window, self.most = window, most
        self.heads, self.tails = dict(window.heads), dict(window.tails)
        self.is_impossible = False
        self._place = {node: i for i, node in enumerate(window.sequence)}
        pairs = dict.fromkeys((c, x) for tasks in window.tasks_on for c in tasks for x in tasks if c != x)
        self.sure = {(c, x): self._by_data(c, x) for c, x in pairs}
        for _ in range(_MOST_ROUNDS):
            look()
            changed = self._raise() | self._by_time()
            for rank in range(len(window.rows)):
                look()
                changed |= self._by_memory(rank)
            if self.is_impossible or not changed:
                break

    def is_before(self, a: int, b: int) -> bool:
        """Whether it is certain that node `a` comes before node `b`, both on one rank."""
        task_a, task_b = self.window.task_of[a], self.window.task_of[b]
        return a < b if task_a == task_b else a < self.sure[task_a, task_b][b - self.window.nodes_of[task_b].start]

    @property
    def edges(self) -> Iterator[tuple[int, int, int]]:
        """The edges of the window, and what else is certain."""
        yield from self.window.edges
        for (c, x), bounds in self.sure.items():
            bound = self.window.nodes_of[c].start
            for node, sure in zip(self.window.nodes_of[x], bounds, strict=True):
                if sure > bound:  # else it follows from the node of x before
                    bound = sure
                    yield bound - 1, node, 0

    def _by_data(self, c: int, x: int) -> list[int]:
        """`sure[c, x]` as far as it follows from data."""
        nodes, problem = self.window.nodes_of[c], self.window.critical_path.problem
        if not problem.after[c, x]:
            return [nodes.start] * len(self.window.nodes_of[x])
        shift = int(problem.first_node[c] - problem.first_node[x]) + 1
        return [min(max(node + shift, nodes.start), nodes.stop) for node in self.window.nodes_of[x]]

    def _raise(self) -> bool:
        """Raises heads and tails along the edges, once; whether one has risen."""
        heads, tails, lengths = self.heads, self.tails, self.window.lengths
        edges = sorted(self.edges, key=lambda edge: self._place[edge[0]])
        changed = False
        for a, b, lag in edges:
            if (head := heads[a] + lengths[a] + lag) > heads[b]:
                heads[b] = head
                changed = True
        for a, b, lag in reversed(edges):
            if (tail := tails[b] + lengths[b] + lag) > tails[a]:
                tails[a] = tail
                changed = True
        self.is_impossible |= any(heads[n] + lengths[n] + tails[n] > self.most for n in lengths)
        return changed

    def _by_time(self) -> bool:
        """Puts c before x where x before c would end too late."""
        changed = False
        heads, tails, lengths = self.heads, self.tails, self.window.lengths
        for (c, x), bounds in self.sure.items():
            nodes = self.window.nodes_of[c]
            bound = nodes.start
            both = lengths[nodes.start] + lengths[self.window.nodes_of[x].start]
            for j, node in enumerate(self.window.nodes_of[x]):
                bound = max(bound, bounds[j])
                while bound < nodes.stop and heads[node] + both + tails[bound] > self.most:
                    bound += 1
                if bound > bounds[j]:
                    bounds[j] = bound
                    changed = True
        return changed

    def _by_memory(self, rank: int) -> bool:
        """Finds what has to be freed before an op that takes memory, and what may not be taken before it."""
        problem = self.window.critical_path.problem
        limit = int(problem.limits_bytes[rank])
        if limit == NO_LIMIT or not self.window.is_free[rank]:
            return False
        changed = False
        tasks = {task: int(problem.held_bytes[task]) for task in self.window.tasks_on[rank]}
        for x, held in tasks.items():
            needed = max(held, 0) + int(problem.peak_bytes[x])
            if needed <= 0:
                continue
            for j, node in enumerate(self.window.nodes_of[x]):
                least = self.window.levels_bytes[rank] + needed + held * j
                least += sum(h * self._helpful(c, x, j, node, h) for c, h in tasks.items() if c != x)
                if least > limit:
                    self.is_impossible = True
                    return True
                for c, h in tasks.items():
                    if c != x and h:
                        changed |= self._tighten(c, x, j, node, (limit - least) // abs(h), h)
        return changed

    def _helpful(self, c: int, x: int, j: int, node: int, held: int) -> int:
        """How many nodes of c come before x's j-th at best: few if they take memory, many if they free it."""
        nodes = self.window.nodes_of[c]
        if held > 0:
            return self.sure[c, x][j] - nodes.start
        return sum(node >= bound for bound in self.sure[x, c])

    def _tighten(self, c: int, x: int, j: int, node: int, slack: int, held: int) -> bool:
        """Raises `sure` where c may be only `slack` nodes away from what helps most."""
        nodes = self.window.nodes_of[c]
        count = self._helpful(c, x, j, node, held)
        if held < 0:
            bound = nodes.start + count - slack
            if bound > self.sure[c, x][j]:
                self.sure[c, x][j] = bound
                return True
        elif count + slack < len(nodes) and self.sure[x, c][count + slack] <= node:
            self.sure[x, c][count + slack] = node + 1
            return True
        return False
