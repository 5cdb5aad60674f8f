"""A CP-SAT model that re-orders the ops of a window, exactly.

Starts, no-overlap on each rank, and for two ops of a rank a literal that says which comes first (Manne, "On the
job-shop scheduling problem", Operations Research, 1960). Memory counts these literals: before an op starts its rank
holds what the ops before it have left there. Micro-batches are in order in each task, so that the literals of two tasks
imply each other.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from ortools.sat.python import cp_model

from rota.search.exact.window import Certain, StepEndTimes, Window
from rota.search.problem import NO_LIMIT
from rota.stopping import look

_S_A_NODE, _S_A_LITERAL = (
    1e-5,
    2e-5,
)  # nominal seconds per node and literal to deduce what is certain and build the model


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
        #: For two nodes of a free rank whether the first comes first, where that is not certain.
        self.literals: dict[tuple[int, int], cp_model.IntVar] = {}
        self._add_edges()
        for rank, row in enumerate(window.rows):
            if window.is_free[rank]:
                self._add_no_overlap(row)
                self._add_memory(rank, row)
        self._add_implications()

    @property
    def nominal_s(self) -> float:
        """Nominal seconds that it costs to make the model."""
        return _S_A_NODE * len(self.window.sequence) + (0 if self.is_impossible else _S_A_LITERAL * len(self.literals))

    def before(self, a: int, b: int) -> cp_model.LiteralT:
        """Whether node `a` comes before node `b`, both on one free rank."""
        if self.certain.is_before(a, b) or self.certain.is_before(b, a):
            return int(self.certain.is_before(a, b))
        if (b, a) in self.literals:
            return ~self.literals[b, a]
        if (a, b) not in self.literals:
            literal = self.model.new_bool_var(f"{a} before {b}")
            self.model.add(self.starts[b] >= self.ends[a]).only_enforce_if(literal)
            self.model.add(self.starts[a] >= self.ends[b]).only_enforce_if(~literal)
            self.literals[a, b] = literal
        return self.literals[a, b]

    def minimize(self) -> None:
        """Minimizes `end_us`: the latest of the nodes' ends with their tails, and of the step ends."""
        for node, tail in self.window.tails.items():
            self.require_end(self.ends[node] + tail)
        for ends, later_us in self.window.step_ends:
            for i, end in enumerate(ends):
                others = [(other, self._is_later(end, other, j > i)) for j, other in enumerate(ends) if j != i]
                follow = cp_model.LinearExpr.weighted_sum(
                    [is_later for _, is_later in others], [other.reduce_us * self.ticks for other, _ in others]
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
        """Requires `end_us` not to be before `end` in ticks; the ticks of ops of no duration do not fill a µs."""
        self.model.add(end < (self.end_us + 1) * self.ticks)

    def _add_edges(self) -> None:
        for a, b, lag in self.certain.edges:
            self.model.add(self.starts[b] >= self.ends[a] + lag)

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
        limit = int(problem.limits_bytes[rank]) - self.window.levels_bytes[rank]
        if problem.limits_bytes[rank] == NO_LIMIT:
            return
        held = {node: int(problem.held_bytes[task]) for node, task in self.window.task_of.items()}
        for node in row:
            look()
            needed = max(held[node], 0) + int(problem.peak_bytes[self.window.task_of[node]])
            if needed > 0:
                kept = [held[other] * self.before(other, node) for other in row if other != node and held[other]]
                self.model.add(sum(kept) + needed <= limit)

    def _add_implications(self) -> None:
        """What comes before an op comes before its task's next op; what an op follows, its next op follows."""
        nodes_of, task_of = self.window.nodes_of, self.window.task_of
        for (a, b), literal in self.literals.items():
            if b + 1 in nodes_of[task_of[b]]:
                self._imply(literal, a, b + 1)
            if a - 1 in nodes_of[task_of[a]]:
                self._imply(literal, a - 1, b)

    def _imply(self, literal: cp_model.IntVar, a: int, b: int) -> None:
        if (a, b) in self.literals:
            self.model.add_implication(literal, self.literals[a, b])
        elif (b, a) in self.literals:
            self.model.add_implication(literal, ~self.literals[b, a])

    def hint(self) -> None:
        """Hints at the rows as they are."""
        window = self.window
        times = dict(self.certain.heads)
        following: dict[int, list[tuple[int, int]]] = {node: [] for node in window.sequence}
        place: list[dict[int, int]] = [{node: i for i, node in enumerate(row)} for row in window.rows]
        for a, b, lag in window.edges:
            following[a].append((b, lag))
        for row in window.rows:
            for a, b in pairwise(row):
                following[a].append((b, 0))
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
