"""When each op of given orders starts, and how far it then still is to the end: heads and tails.

The critical path method (Kelley and Walker, 1959). Times are in ticks, so many to the µs that all ops of no length, a
tick each, fit into less than one: then whatever waits for something starts later than it, and whole µs stay exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numba import njit

from rota.search.problem import Integers, Orders, Problem
from rota.search.timing import StepEnds, Tables, measure, start_times

_NOWHERE = -(1 << 60)  # the tail of an op from which no way leads to what is measured


@dataclass(frozen=True)
class Clock:
    """A problem's times in ticks; `of_span`: what is measured is the span, else the makespan."""

    problem: Problem
    of_span: bool

    @cached_property
    def ticks(self) -> int:
        """In a µs."""
        return 1 + int(self.problem.counts[self.problem.durations_us == 0].sum())

    @cached_property
    def lengths(self) -> Integers:
        """Of each task."""
        return np.maximum(self.problem.durations_us * self.ticks, 1)

    @cached_property
    def task_of(self) -> Integers:
        """For each node."""
        return np.repeat(np.arange(len(self.problem.counts)), self.problem.counts)

    @cached_property
    def nodes_on(self) -> list[Integers]:
        """For each rank, in no order."""
        on, first = self.problem.tasks_on, self.problem.first_node
        rows = [on.values[on.first[r] : on.first[r + 1]] for r in range(self.problem.placement.num_ranks)]
        return [np.concatenate([np.arange(0), *(np.arange(first[t], first[t + 1]) for t in row)]) for row in rows]

    @cached_property
    def _tables(self) -> Tables:
        inputs, outputs = self.problem.inputs.values.copy(), self.problem.outputs.values.copy()
        inputs[1::2] *= self.ticks
        outputs[1::2] *= self.ticks
        tables = Tables.of(self.problem)
        return tables._replace(durations_us=self.lengths, inputs=inputs, outputs=outputs)

    @cached_property
    def _of_step_ends(self) -> tuple[Tables, StepEnds]:
        return Tables.of(self.problem), StepEnds.of(self.problem)

    def orders(self, rows: Sequence[Sequence[int]]) -> Orders:
        """The tasks of each rank's nodes."""
        return self.task_of[[node for row in rows for node in row]].astype(np.int32)

    def paths(self, orders: Orders) -> Paths | None:
        """None if the orders wait in a cycle. A span's tails take each rank's first start to stay where it is."""
        starts = start_times(self._tables, orders)
        if starts is None:
            return None
        rows = [nodes[np.argsort(starts[nodes])] for nodes in self.nodes_on]
        tails = np.full(len(starts), _NOWHERE)
        step_ends: list[list[tuple[int, int]]] = [[] for _ in rows]
        if self.of_span:
            after = np.array([-starts[row[0]] if len(row) else _NOWHERE for row in rows])
        else:
            after = np.array([self.optimizers(rank) for rank in range(len(rows))])
            step_ends = [self._add_step_ends(rank, row, tails) for rank, row in enumerate(rows)]
        t = self._tables
        _spread_back(
            np.argsort(starts), tails, after.copy(), self.task_of, t.first_node, self.lengths, t.first_rank, t.ranks,
            t.first_output, t.outputs,
        )  # fmt: skip
        makespan_us, span_us = measure(*self._of_step_ends, orders, starts // self.ticks)
        return Paths(int(span_us if self.of_span else makespan_us), starts, tails, after, rows, step_ends)

    def optimizers(self, rank: int) -> int:
        """Ticks of the rank's optimizer steps."""
        first, after = self.problem.step_ends.first[rank : rank + 2]
        return int(self.problem.step_ends.values[first:after][2::3].sum()) * self.ticks

    def _add_step_ends(self, rank: int, row: Integers, tails: Integers) -> list[tuple[int, int]]:
        """(place of the last gradient in the row, step end), in order; to the tails of these what then follows."""
        problem = self.problem
        first, after = problem.step_ends.first[rank : rank + 2].tolist()
        position = {int(node): i for i, node in enumerate(row)} if after > first else {}
        last = []
        for end in range(first // 3, after // 3):
            places = [position[node] for node in last_gradients(problem, end) if node in position]
            last.append((max(places, default=-1), end))
        last.sort()  # as `Plan.step_end_ranks` does
        follows = self.optimizers(rank)
        for place, end in reversed(last):
            follows += int(problem.step_ends.values[3 * end + 1]) * self.ticks
            if place >= 0:
                tails[row[place]] = max(tails[row[place]], follows)
        return last


def last_gradients(problem: Problem, end: int) -> list[int]:
    """The last node of each task that makes gradients for the `end`-th of `Problem.step_ends`."""
    tasks = problem.gradients.values[problem.gradients.first[end] : problem.gradients.first[end + 1]]
    nodes: list[int] = (problem.first_node[tasks[problem.counts[tasks] > 0] + 1] - 1).tolist()
    return nodes


@dataclass(frozen=True)
class Paths:
    """What is measured, in µs; `starts` as soon as possible and `tails`, in ticks; `rows[rank]`: its nodes in order.

    What is measured grows when a node ends more than its tail before that. `after[rank]` is what follows the rank's
    last op, `step_ends[rank]` lists (place of the last gradient in the row, index into `Problem.step_ends`) in order.
    """

    value_us: int
    starts: Integers
    tails: Integers
    after: Integers
    rows: list[Integers]
    step_ends: list[list[tuple[int, int]]]


@njit(cache=True, nogil=True)
def _spread_back(  # type: ignore[no-untyped-def]
    sequence, tails, after, task_of, first_node, lengths, first_rank, ranks, first_output, outputs
):
    """Raises `tails` to what follows; `after[rank]`: the longest way from the start of the rank's next op."""
    for i in range(len(sequence) - 1, -1, -1):
        node = sequence[i]
        task = task_of[node]
        tail = tails[node]
        for j in range(first_output[task], first_output[task + 1], 2):
            target = outputs[j]
            reader = first_node[target] + node - first_node[task]
            tail = max(tail, outputs[j + 1] + lengths[target] + tails[reader])
        for j in range(first_rank[task], first_rank[task + 1]):
            tail = max(tail, after[ranks[j]])
        tails[node] = tail
        for j in range(first_rank[task], first_rank[task + 1]):
            after[ranks[j]] = lengths[task] + tail
