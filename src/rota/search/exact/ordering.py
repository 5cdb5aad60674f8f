"""A window of a step's ops, what is certain about their order, and a CP-SAT model that re-orders them, exactly.

Certain from heads and tails: an op that cannot come after another one in time comes before it (Carlier and Pinson, "An
algorithm for solving the job-shop problem", 1989). From memory: an op that takes what is not free yet comes after ops
that free it.

The model has starts, no-overlap on each rank, and for two ops of a rank a literal that says which comes first (Manne,
"On the job-shop scheduling problem", Operations Research, 1960). Memory counts these literals: before an op starts its
rank holds what the ops before it have left there. Micro-batches are in order in each task, so that the literals of two
tasks imply each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ortools.sat.python import cp_model

from rota.core.stopping import look
from rota.search.critical_path import CriticalPath, last_gradients
from rota.search.problem import NO_LIMIT, Problem

_S_PER_NODE, _S_PER_LITERAL = 1e-5, 2e-5  # nominal seconds, of deduction and of building the model
_MOST_ROUNDS = 8  # of deduction; what was found by then holds


@dataclass(frozen=True)
class StepEndTimes:
    """A stage's reduction on a rank, which follows the last of its `gradients` (nodes of the window)."""

    gradients: tuple[int, ...]
    reduce_us: int


def step_ends_in(
    problem: Problem, step_ends: Iterable[tuple[int, int]], window: range, nodes: Sequence[int]
) -> tuple[tuple[StepEndTimes, ...], int]:
    """Of a rank's (position of the last gradient, step end) those in the window, and the µs of what follows them."""
    times, later_us = [], 0
    for position, end in step_ends:
        reduce_us = int(problem.step_ends.reduce_us[end])
        later_us += int(problem.step_ends.optimizer_us[end])
        if position >= window.stop:
            later_us += reduce_us
        elif position >= window.start:
            gradients = tuple(node for node in last_gradients(problem, end) if node in nodes)
            times.append(StepEndTimes(gradients, reduce_us))
    return tuple(times), later_us


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
                targets = self.nodes_of[target]
                nodes = (node for node in self.nodes_of[source] if node + shift in targets)
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
        is_impossible: No order satisfies it.
        sure: For tasks c and x of one free rank, all nodes of c below `sure[c, x][j]` come before x's j-th node.
        heads: Those of the window, raised.
        tails: Those of the window, raised.
    """

    def __init__(self, window: Window, most: int) -> None:
        self.window, self.most = window, most
        self.heads, self.tails = dict(window.heads), dict(window.tails)
        self.is_impossible = False
        self._place = {node: i for i, node in enumerate(window.sequence)}
        free = (tasks for tasks, is_free in zip(window.tasks_on, window.is_free, strict=True) if is_free)
        pairs = dict.fromkeys((c, x) for tasks in free for c in tasks for x in tasks if c != x)
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
        if task_a == task_b:
            return a < b
        if (task_a, task_b) not in self.sure:  # their rank's order stays
            return self._place[a] < self._place[b]
        return a < self.sure[task_a, task_b][b - self.window.nodes_of[task_b].start]

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
        """Finds which ops must free memory before an op that allocates it, and which ops must come after it."""
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
        """How many nodes of c come before x's j-th at best: few if they allocate memory, many if they free it."""
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


class Ordering:
    """The orders of a window in which every end plus its tail is at most `end_us`, a variable from `least_us` on.

    Where there are none, `is_impossible` is set and there is no model.
    """

    def __init__(self, window: Window, least_us: int, most_us: int, horizon_us: int | None = None) -> None:
        """The model for `least_us` <= `end_us` <= `most_us`; no op ends after `horizon_us` (default: `most_us`)."""
        self.window = window
        self.ticks = window.critical_path.ticks
        horizon = ((most_us if horizon_us is None else horizon_us) + 1) * self.ticks - 1
        self.certain = Certain(window, horizon)
        #: For two nodes of a free rank whether the first comes first, where that is not certain.
        self.literals: dict[tuple[int, int], cp_model.IntVar] = {}
        self.is_impossible = self.certain.is_impossible or least_us > most_us
        if self.is_impossible:
            return
        self.model = cp_model.CpModel()
        self.end_us = self.model.new_int_var(least_us, most_us, "end")
        heads, tails, lengths = self.certain.heads, self.certain.tails, window.lengths
        self.starts = {
            node: self.model.new_int_var(heads[node], horizon - tails[node] - lengths[node], f"start {node}")
            for node in window.sequence
        }
        self.ends = {node: start + lengths[node] for node, start in self.starts.items()}
        for a, b, lag in self.certain.edges:
            self.model.add(self.starts[b] >= self.ends[a] + lag)
        for rank, row in enumerate(window.rows):
            if window.is_free[rank]:
                self._add_no_overlap(row)
                self._add_memory(rank, row)
        self._add_implications()

    @property
    def nominal_s(self) -> float:
        """Nominal seconds that it costs to make the model."""
        return _S_PER_NODE * len(self.window.sequence) + _S_PER_LITERAL * len(self.literals)

    def before(self, a: int, b: int) -> cp_model.LiteralT:
        """Whether node `a` comes before node `b`, both on one free rank."""
        if self.certain.is_before(a, b) or self.certain.is_before(b, a):
            return int(self.certain.is_before(a, b))
        if (order := self.order_of(a, b)) is not None:
            return order
        literal = self.literals[a, b] = self.model.new_bool_var(f"{a} before {b}")
        self.model.add(self.starts[b] >= self.ends[a]).only_enforce_if(literal)
        self.model.add(self.starts[a] >= self.ends[b]).only_enforce_if(~literal)
        return literal

    def order_of(self, a: int, b: int) -> cp_model.LiteralT | None:
        """The literal for `a` before `b`, if there is one."""
        if (b, a) in self.literals:
            return ~self.literals[b, a]
        return self.literals.get((a, b))

    def minimize(self) -> None:
        """Minimizes `end_us`: the latest of the nodes' ends with their tails, and of the step ends."""
        for node, tail in self.window.tails.items():
            self.require_end(self.ends[node] + tail)
        for ends, later_us in self.window.step_ends:
            for i, end in enumerate(ends):
                later = [(other, self._is_later(end, other, j > i)) for j, other in enumerate(ends) if j != i]
                follow = cp_model.LinearExpr.weighted_sum(
                    [is_later for _, is_later in later], [other.reduce_us * self.ticks for other, _ in later]
                )
                follow += (end.reduce_us + later_us) * self.ticks
                self.require_end(follow)
                for node in end.gradients:
                    self.require_end(self.ends[node] + follow)
        self.model.minimize(self.end_us)

    def _is_later(self, end: StepEndTimes, other: StepEndTimes, by_index: bool) -> cp_model.LiteralT:
        """Whether the last gradient of `other` comes after all gradients of `end`; stages without any come first."""
        if end.gradients == other.gradients:
            return int(by_index)
        if not end.gradients or not other.gradients:
            return int(not end.gradients)
        is_later = self.model.new_bool_var("later step end")
        for node in other.gradients:
            self.model.add_bool_or([is_later, *(self.before(node, before) for before in end.gradients)])
        return is_later

    def require_end(self, end: cp_model.LinearExprT) -> None:
        """Requires `end_us` not to be before `end` in ticks; extra ticks of zero-length ops never add up to 1 µs."""
        self.model.add(end < (self.end_us + 1) * self.ticks)

    def _add_no_overlap(self, row: tuple[int, ...]) -> None:
        lengths = self.window.lengths
        intervals = [self.model.new_fixed_size_interval_var(self.starts[n], lengths[n], f"{n}") for n in row]
        self.model.add_no_overlap(intervals)
        for i, a in enumerate(row):
            look()
            for b in row[i + 1 :]:
                self.before(a, b)

    def _add_memory(self, rank: int, row: tuple[int, ...]) -> None:
        problem = self.window.critical_path.problem
        if problem.limits_bytes[rank] == NO_LIMIT:
            return
        limit = int(problem.limits_bytes[rank]) - self.window.levels_bytes[rank]
        held = {node: int(problem.held_bytes[task]) for node, task in self.window.task_of.items()}
        for node in row:
            look()
            needed = max(held[node], 0) + int(problem.peak_bytes[self.window.task_of[node]])
            if needed > 0:
                level = sum(held[other] * self.before(other, node) for other in row if other != node and held[other])
                self.model.add(level + needed <= limit)

    def _add_implications(self) -> None:
        """If a precedes b, a precedes b's next op, and a's previous op precedes b."""
        nodes_of, task_of = self.window.nodes_of, self.window.task_of
        for (a, b), literal in self.literals.items():
            if b + 1 in nodes_of[task_of[b]]:
                self._imply(literal, a, b + 1)
            if a - 1 in nodes_of[task_of[a]]:
                self._imply(literal, a - 1, b)

    def _imply(self, literal: cp_model.IntVar, a: int, b: int) -> None:
        if (order := self.order_of(a, b)) is not None:
            self.model.add_implication(literal, order)

    def hint(self) -> None:
        """Hints at the rows as they are."""
        window = self.window
        times = dict(self.certain.heads)
        following: dict[int, list[tuple[int, int]]] = {node: [] for node in window.sequence}
        place: list[dict[int, int]] = [{node: i for i, node in enumerate(row)} for row in window.rows]
        in_rows = ((a, b, 0) for row in window.rows for a, b in pairwise(row))
        for a, b, lag in (*window.edges, *in_rows):
            following[a].append((b, lag))
        for node in window.sequence:
            for other, lag in following[node]:
                times[other] = max(times[other], times[node] + window.lengths[node] + lag)
        for node, start in self.starts.items():
            self.model.add_hint(start, times[node])
        for (a, b), literal in self.literals.items():
            row_place = next(row for row in place if a in row and b in row)
            self.model.add_hint(literal, row_place[a] < row_place[b])
        ends = [times[node] + window.lengths[node] + window.tails[node] for node in times]
        self.model.add_hint(self.end_us, max(ends) // self.ticks)

    def rows(self, value: Callable[[cp_model.IntVar], int]) -> list[list[int]]:
        """The window's rows in the order of a solution."""
        return [sorted(row, key=lambda node: value(self.starts[node])) for row in self.window.rows]
