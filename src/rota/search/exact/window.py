"""Some ops of a step that are to be put in order, and what is certain about it before any search.

Windows of heads and tails: an op that cannot come after another one in time comes before it (Carlier and Pinson, "An
algorithm for solving the job-shop problem", 1989). Memory says more: an op that takes what is not free yet comes after
those that free it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from rota.search.paths import Clock
from rota.search.problem import NO_LIMIT
from rota.stopping import look

_MOST_ROUNDS = 8  # of deduction; all that it finds holds whenever it stops


@dataclass(frozen=True)
class StepEnd:
    """A stage's reduction on a rank, after the last of its `gradients` (nodes of the window)."""

    gradients: tuple[int, ...]
    reduce_us: int


@dataclass(frozen=True)
class Window:
    """`rows[rank]` are nodes next to each other in the rank's order; before them the rank holds `levels_bytes[rank]`.

    `sequence` are all nodes, each after those that it waits for in these rows.
    A node starts no earlier than its head, and its tail follows its end (ticks). Where `is_free[rank]` is not set the
    rank's order stays. Every way between two nodes of the window stays within it. `step_ends[rank]`: those whose last
    gradients are in the window, and the time of what follows them: later reductions, and all optimizer steps.
    """

    clock: Clock
    sequence: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    is_free: tuple[bool, ...]
    levels_bytes: tuple[int, ...]
    heads: Mapping[int, int]
    tails: Mapping[int, int]
    step_ends: tuple[tuple[tuple[StepEnd, ...], int], ...]

    @cached_property
    def task_of(self) -> dict[int, int]:
        """For each node."""
        return dict(zip(self.sequence, self.clock.task_of[list(self.sequence)].tolist(), strict=True))

    @cached_property
    def lengths(self) -> dict[int, int]:
        """In ticks."""
        lengths: list[int] = self.clock.lengths.tolist()
        return {node: lengths[task] for node, task in self.task_of.items()}

    @cached_property
    def nodes_of(self) -> dict[int, range]:
        """For each task its nodes, which follow each other."""
        nodes: dict[int, range] = {}
        for node in sorted(self.task_of):
            task = self.task_of[node]
            nodes[task] = range(nodes[task].start if task in nodes else node, node + 1)
        return nodes

    @cached_property
    def tasks_on(self) -> list[list[int]]:
        """For each rank."""
        return [list(dict.fromkeys(self.task_of[node] for node in row)) for row in self.rows]

    @cached_property
    def edges(self) -> list[tuple[int, int, int]]:
        """(node, node, lag in ticks) of data, of a task's micro-batches, and of ranks whose order stays."""
        problem = self.clock.problem
        edges = []
        for (source, target), lag in problem.lags_us.items():
            if source in self.nodes_of and target in self.nodes_of:
                shift = int(problem.first_node[target] - problem.first_node[source])
                others = self.nodes_of[target]
                nodes = (node for node in self.nodes_of[source] if node + shift in others)
                edges += [(node, node + shift, lag * self.clock.ticks) for node in nodes]
        for nodes_ in self.nodes_of.values():
            edges += [(a, b, 0) for a, b in pairwise(nodes_)]
        for row, is_free in zip(self.rows, self.is_free, strict=True):
            if not is_free:
                edges += [(a, b, 0) for a, b in pairwise(row)]
        return edges


class Certain:
    """What must be if every node's end plus its tail is at most `most` ticks.

    `is_impossible`: it cannot be. `sure[c, x][j]`: all nodes of task c below this one come before the j-th node of task
    x in the window; c and x are on one rank. `heads` and `tails` are those of the window, raised.
    """

    def __init__(self, window: Window, most: int) -> None:
        self.window, self.most = window, most
        self.heads, self.tails = dict(window.heads), dict(window.tails)
        self.is_impossible = False
        self._place = {node: i for i, node in enumerate(window.sequence)}
        self._reached = _reached(window.clock)
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
        """Whether node `a` surely comes before node `b`, both on one rank."""
        task_a, task_b = self.window.task_of[a], self.window.task_of[b]
        return a < b if task_a == task_b else a < self.sure[task_a, task_b][b - self.window.nodes_of[task_b].start]

    @property
    def edges(self) -> Iterator[tuple[int, int, int]]:
        """The window's, and what else is sure."""
        yield from self.window.edges
        for (c, x), bounds in self.sure.items():
            bound = self.window.nodes_of[c].start
            for node, sure in zip(self.window.nodes_of[x], bounds, strict=True):
                if sure > bound:  # else it follows from the node of x before
                    bound = sure
                    yield bound - 1, node, 0

    def _by_data(self, c: int, x: int) -> list[int]:
        nodes, first_node = self.window.nodes_of[c], self.window.clock.problem.first_node
        if (c, x) not in self._reached:
            return [nodes.start] * len(self.window.nodes_of[x])
        shift = int(first_node[c] - first_node[x]) + 1
        return [min(max(node + shift, nodes.start), nodes.stop) for node in self.window.nodes_of[x]]

    def _raise(self) -> bool:
        """Heads and tails along the edges, once; whether one has risen."""
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
        """c before x where x before c would end too late."""
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
        """What has to be freed before an op that takes, and what may not be taken before it."""
        problem = self.window.clock.problem
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
        """How many nodes of c come before x's j-th at best: few if they take, many if they free."""
        nodes = self.window.nodes_of[c]
        if held > 0:
            return self.sure[c, x][j] - nodes.start
        return sum(node >= bound for bound in self.sure[x, c])

    def _tighten(self, c: int, x: int, j: int, node: int, slack: int, held: int) -> bool:
        """c may be `slack` nodes away from what helps most."""
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


def _reached(clock: Clock) -> set[tuple[int, int]]:
    """(task, task) that a way of edges joins."""
    problem = clock.problem
    reached: set[tuple[int, int]] = set()
    for task in reversed(problem.topological):
        for source, target in problem.lags_us:
            if source == task:
                reached |= {(task, b) for a, b in reached if a == target} | {(task, target)}
    return reached
