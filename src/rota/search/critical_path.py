"""When each op starts in some orders, and how long the rest of the step lasts after it: heads and tails.

The critical path method (Kelley and Walker, 1959). Times are in ticks. A µs has so many ticks that all ops of no
duration, a tick each, fit into less than one µs: then an op starts later than whatever it waits for, and whole µs stay
exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rota.compiled import quick
from rota.search.problem import Integers, Orders, Problem
from rota.search.timing import Tables, measure, start_times

_NOWHERE = -(1 << 60)  # the tail of an op from which no path leads to what is measured


@dataclass(frozen=True)
class CriticalPath:
    """A problem's times in ticks. What is measured is the span if `of_span`, else the makespan."""

    problem: Problem
    of_span: bool

    @cached_property
    def ticks(self) -> int:
        """Ticks per µs."""
        return 1 + int(self.problem.counts[self.problem.durations_us == 0].sum())

    @cached_property
    def lengths(self) -> Integers:
        """int64[num_tasks]: duration in ticks, 1 or more."""
        return np.maximum(self.problem.durations_us * self.ticks, 1)

    @cached_property
    def nodes_on(self) -> list[Integers]:
        """One int64 array per rank: its nodes, task by task."""
        first = self.problem.first_node
        return [
            np.concatenate([np.arange(0), *(np.arange(first[t], first[t + 1]) for t in tasks)])
            for tasks in self.problem.tasks_on
        ]

    @cached_property
    def _tables(self) -> Tables:
        """With durations and lags in ticks."""
        inputs, outputs = self.problem.inputs.values.copy(), self.problem.outputs.values.copy()
        inputs[1::2] *= self.ticks
        outputs[1::2] *= self.ticks
        tables = Tables.of(self.problem)
        return tables._replace(durations_us=self.lengths, inputs=inputs, outputs=outputs)

    @cached_property
    def _tables_us(self) -> Tables:
        return Tables.of(self.problem)

    def orders(self, rows: Sequence[Sequence[int]]) -> Orders:
        """The orders in which each rank does these nodes."""
        return self.problem.task_of[[node for row in rows for node in row]].astype(np.int32)

    def paths(self, orders: Orders) -> Paths | None:
        """None if the orders wait in a cycle. A span's tails assume that each rank's first start stays where it is."""
        starts = start_times(self._tables, orders)
        if starts is None:
            return None
        rows = [nodes[np.argsort(starts[nodes])] for nodes in self.nodes_on]
        tails = np.full(len(starts), _NOWHERE)
        step_ends: list[list[tuple[int, int]]] = [[] for _ in rows]
        if self.of_span:
            after = np.array([-starts[row[0]] if len(row) else _NOWHERE for row in rows])
            after[self.problem.num_ranks :] = _NOWHERE  # a shared link's window does not count
        else:
            after = np.array([self.optimizer_ticks(rank) for rank in range(len(rows))])
            step_ends = [self._add_step_ends(rank, row, tails) for rank, row in enumerate(rows)]
        _spread_back(self._tables, np.argsort(starts), tails, after.copy(), self.problem.task_of)
        makespan_us, span_us = measure(self._tables_us, self.problem.step_ends, orders, starts // self.ticks)
        return Paths(int(span_us if self.of_span else makespan_us), starts, tails, after, rows, step_ends)

    def optimizer_ticks(self, rank: int) -> int:
        """Duration of the rank's optimizer steps."""
        return self.problem.step_ends.optimizers_us(rank) * self.ticks

    def _add_step_ends(self, rank: int, row: Integers, tails: Integers) -> list[tuple[int, int]]:
        """(position of the last gradient in the row, step end) in order; raises the tails of these gradients."""
        problem, ends = self.problem, self.problem.step_ends.of_rank(rank)
        position = {int(node): i for i, node in enumerate(row)} if ends else {}
        last = []
        for end in ends:
            places = [position[node] for node in last_gradients(problem, end) if node in position]
            last.append((max(places, default=-1), end))
        last.sort()  # as `Plan.step_end_ranks` does
        follows = self.optimizer_ticks(rank)
        for place, end in reversed(last):
            follows += int(problem.step_ends.reduce_us[end]) * self.ticks
            if place >= 0:
                tails[row[place]] = max(tails[row[place]], follows)
        return last


def last_gradients(problem: Problem, end: int) -> list[int]:
    """The last node of each task that makes gradients for the `end`-th of `Problem.step_ends`."""
    tasks = problem.step_ends.gradients_of(end)
    return (problem.first_node[tasks[problem.counts[tasks] > 0] + 1] - 1).tolist()


@dataclass(frozen=True)
class Paths:
    """Heads and tails of some orders. What is measured grows if a node ends later than its tail allows."""

    value_us: int  #: what is measured
    starts: Integers  #: int64[num_ops], in ticks: each node starts as soon as it can
    tails: Integers  #: int64[num_ops], in ticks
    after: Integers  #: int64[num_ranks], in ticks: what follows the rank's last op
    rows: list[Integers]  #: per rank its nodes in order
    #: Per rank (position of the last gradient in the row, index into `Problem.step_ends`), in order.
    step_ends: list[list[tuple[int, int]]]


@quick
def _spread_back(tables: Tables, sequence: Integers, tails: Integers, after: Integers, task_of: Integers) -> None:
    """Raises `tails` to what follows; `after[rank]`: the longest path from the start of the rank's next op."""
    _, first_node, lengths, first_rank, ranks, _, _, first_output, outputs, _, _, _ = tables
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
