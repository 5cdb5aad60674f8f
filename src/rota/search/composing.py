"""The model of a step with a middle that repeats: its whole in one, on top of `ordering`.

Of each task the k-th micro-batch is in the middle, those before it come before the middle on all of its ranks, those
after it come after. On each rank the middle lasts at most a period. So that more periods may come in between, what a
task reads has to be there too where the source is a different number of periods on than the target is.

Every op has two starts. With `flat` ones the middle repeats; `Ordering` has those of the step alone, where ops need not
wait for that and may start sooner. The orders are the same, and the end of the step alone is what is least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ortools.sat.python import cp_model

from rota.plan import Plan
from rota.search.budget import Budget
from rota.search.exact import cpsat, whole_step
from rota.search.exact.ordering import Ordering
from rota.search.paths import Clock
from rota.search.problem import Problem
from rota.stopping import look

Starts = Sequence[Sequence[int]]


class Composed(NamedTuple):
    """As in `Repeating`, `starts_us` with which the middle repeats."""

    starts_us: tuple[tuple[int, ...], ...]
    middle: tuple[int, ...]
    is_optimal: bool


def compose(
    plan: Plan, period_us: int, starts_us: Starts, middle: Sequence[int], budget: Budget, seed: int
) -> Composed | None:
    """The shortest step with a middle of this period, from the one given on; None if the budget has not sufficed."""
    model = _Model(plan, period_us, starts_us)
    budget.spend(model.ordering.nominal_s)
    if model.ordering.is_impossible:
        return None
    model.add_flat_starts()
    model.add_middle()
    model.add_repetition()
    model.ordering.minimize()
    model.hint(starts_us, middle)
    status, solver = cpsat.solve(model.ordering.model, budget, seed)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return Composed(*model.read(solver), status == cp_model.OPTIMAL)


class _Model:
    """Of tasks that take time, so that a tick is a µs."""

    def __init__(self, plan: Plan, period_us: int, starts_us: Starts) -> None:
        self.problem = Problem(replace(plan.placement, step_ends=()), plan.num_microbatches)
        clock = Clock(self.problem, of_span=False)
        window, value_us = whole_step(clock, self.problem.to_orders(plan))
        assert value_us is not None
        self.ordering = Ordering(window, 0, value_us)
        assert clock.ticks == 1, "tasks take time"
        self.period_us, self.num_rounds = period_us, len(starts_us[0])
        self.lengths: list[int] = self.problem.durations_us.tolist()
        #: No flat start has to be later: on a way of waits, each op comes once, after a lag and all rounds at most.
        rounds_us = period_us * self.num_rounds * len(self.lengths)
        self.longest_us = self.num_rounds * (sum(self.lengths) + sum(self.problem.lags_us.values()) + rounds_us)

    def add_flat_starts(self) -> None:
        """They follow the same orders, and read what is there."""
        model, window = self.ordering.model, self.ordering.window
        self.flat = {node: model.new_int_var(0, self.longest_us, f"flat{node}") for node in window.sequence}
        for a, b, lag in self.ordering.certain.edges:
            model.add(self.flat[b] >= self.flat[a] + window.lengths[a] + lag)
        for (a, b), is_before in self.ordering.literals.items():
            model.add(self.flat[b] >= self.flat[a] + window.lengths[a]).only_enforce_if(is_before)
            model.add(self.flat[a] >= self.flat[b] + window.lengths[b]).only_enforce_if(~is_before)

    def add_middle(self) -> None:
        """One micro-batch of each task is in it; on a rank it is at most a period, before and after it is the rest."""
        model, rounds = self.ordering.model, range(self.num_rounds)
        self.starts = [[self.flat[node] for node in nodes] for _, nodes in self._nodes()]
        self.is_middle = [[model.new_bool_var(f"m{task}.{k}") for k in rounds] for task, _ in self._nodes()]
        longest = self.longest_us
        self.middle: list[Any] = []  #: its start
        self.index: list[Any] = []
        windows = [[model.new_int_var(0, longest, f"{name}{rank}") for name in ("from", "to")] for rank in self._ranks]
        for first, last in windows:
            model.add(last - first <= self.period_us)
        for task, is_middle in enumerate(self.is_middle):
            model.add_exactly_one(is_middle)
            self.index.append(sum(k * chosen for k, chosen in enumerate(is_middle)))
            self.middle.append(model.new_int_var(0, longest, f"middle{task}"))
            for start, chosen in zip(self.starts[task], is_middle, strict=True):
                model.add(self.middle[task] == start).only_enforce_if(chosen)
            for rank in self.problem.placement.tasks[task].ranks:
                self._add_window(task, *windows[rank])

    @property
    def _ranks(self) -> range:
        return range(self.problem.placement.num_ranks)

    def _nodes(self) -> list[tuple[int, range]]:
        return sorted(self.ordering.window.nodes_of.items())

    def _add_window(self, task: int, first: Any, last: Any) -> None:
        model, length, starts = self.ordering.model, self.lengths[task], self.starts[task]
        model.add(first <= self.middle[task])
        model.add(self.middle[task] + length <= last)
        for k, chosen in enumerate(self.is_middle[task]):
            if k:
                model.add(starts[k - 1] + length <= first).only_enforce_if(chosen)
            if k + 1 < self.num_rounds:
                model.add(starts[k + 1] >= last).only_enforce_if(chosen)

    def add_repetition(self) -> None:
        """What is read is there in time, too, with any number of periods between fill and drain."""
        model, T, n = self.ordering.model, self.period_us, self.num_rounds
        before = [self._sums(row, lambda k: range(k + 1, n), "before") for row in self.is_middle]
        after = [self._sums(row, lambda k: range(k), "after") for row in self.is_middle]
        for (a, b), lag in self.problem.lags_us.items():
            least = self.lengths[a] + lag
            made, read, i, j = self.middle[a], self.middle[b], self.index[a], self.index[b]
            model.add(read + T * (i - j) >= made + least)
            for k in range(1, n - 1):
                look()
                both = [before[a][k], after[b][k]]
                model.add(read + T * (k - j) >= self.starts[a][k] + least).only_enforce_if(both)
                model.add(self.starts[b][k] >= made + T * (k - i) + least).only_enforce_if(both)
                for later in range(k + 1, n):
                    late = model.add(self.starts[b][k] + T * (later - k) >= self.starts[a][later] + least)
                    late.only_enforce_if([before[a][later], after[b][k]])

    def _sums(self, row: Sequence[Any], others: Any, name: str) -> list[Any]:
        literals = []
        for k in range(len(row)):
            literal = self.ordering.model.new_bool_var(name)
            self.ordering.model.add(literal == sum(row[other] for other in others(k)))
            literals.append(literal)
        return literals

    def hint(self, starts_us: Starts, middle: Sequence[int]) -> None:
        model = self.ordering.model
        self.ordering.hint()
        for task, row in enumerate(starts_us):
            for k, start in enumerate(row):
                model.add_hint(self.starts[task][k], start)
                model.add_hint(self.is_middle[task][k], k == middle[task])

    def read(self, solver: cp_model.CpSolver) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
        starts = tuple(tuple(solver.value(start) for start in row) for row in self.starts)
        return starts, tuple([solver.value(chosen) for chosen in row].index(1) for row in self.is_middle)
