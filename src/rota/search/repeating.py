"""A step with a middle that can be repeated: fill, one period of a steady state, drain.

Lin et al., "Tessel: Boosting Distributed Execution of Large DNN Models via Flexible Schedule Search", HPCA 2024, search
the three one by one and put them end to end. Here the least period is found first; then one model, on top of
`Ordering`, has the whole step, in which fill, period and drain of different ranks overlap.

In that model, one micro-batch of each task is in the middle; those before it come before the middle on all of its
ranks, those after it come after. On each rank the middle lasts at most a period. So that more periods may come in
between, what a task reads must also be there when the source is a different number of periods on than the target.

Every op has two starts. With its flat start the middle repeats; `Ordering` has the start in the step alone, where an op
need not wait for that and may start sooner. The orders are the same, and the end of the step alone is minimized.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from rota.core.errors import SearchError
from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.core.simulation import simulate
from rota.core.stopping import Stopped, ended_by_ctrl_c, look, watched
from rota.core.tasks import scalar
from rota.search.budget import Budget
from rota.search.critical_path import CriticalPath
from rota.search.exact import cpsat, whole_step
from rota.search.exact.ordering import Ordering
from rota.search.periodic.retiming import Wait, retime
from rota.search.periodic.steady import Steady, SteadyResult, find_steady
from rota.search.problem import Problem
from rota.search.validation import refuse_wrong, seconds_of

_CUT_S = 1.0  # nominal, for CP-SAT to cut a rhythm whose period is known
_MOST_OPS = 512  # of one model; for a longer step, a shorter one is searched and its middle repeated


@dataclass(frozen=True)
class Repeating:
    """A step with a middle that can be repeated.

    With more micro-batches the tasks of the middle are done again `period_us` later, and what follows is postponed by
    as much. A plan runs its ops as soon as it can, which may be sooner than at `starts_us`: those leave time for more
    periods.

    Attributes:
        placement: Its tasks.
        period_us: After how long the middle repeats.
        starts_us: [num_tasks][...]: `starts_us[i][k]` is when task i starts its k-th micro-batch, as in `Steady`.
        middle: `middle[i]` is the k of task i that is repeated.
        is_least: It is proven that no step of as many micro-batches has a middle of a shorter period.
        is_optimal: It is proven that no step whose middle repeats with this period is shorter as a whole.
    """

    placement: Placement
    period_us: int
    starts_us: tuple[tuple[int, ...], ...]
    middle: tuple[int, ...]
    is_least: bool
    is_optimal: bool

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of the step."""
        return len(self.starts_us[0]) * self.placement.num_components

    @cached_property
    def makespan_us(self) -> int:
        """Makespan of `plan`, simulated without reductions and optimizer steps."""
        return simulate(replace(self.plan, placement=replace(self.placement, step_ends=()))).makespan_us

    def unroll(self, num_microbatches: int) -> Repeating:
        """The step of `num_microbatches`, with the middle repeated.

        Raises:
            SearchError: That is fewer micro-batches than there are, or not a multiple of the data streams.
        """
        num_components = self.placement.num_components
        more, rest = divmod(num_microbatches - self.num_microbatches, num_components)
        if more < 0 or rest:
            raise SearchError(
                f"num_microbatches is {num_microbatches}: this step has {self.num_microbatches} micro-batches, and can "
                f"take any number of {num_components} more"
            )
        if not more:
            return self
        rows = []
        for starts, middle in zip(self.starts_us, self.middle, strict=True):
            again = (starts[middle] + i * self.period_us for i in range(more + 1))
            after = (start + more * self.period_us for start in starts[middle + 1 :])
            rows.append((*starts[:middle], *again, *after))
        return replace(self, starts_us=tuple(rows), is_least=False, is_optimal=False)

    @cached_property
    def plan(self) -> Plan:
        """Each rank does its ops in the order of their starts."""
        problem = Problem(self.placement, self.num_microbatches)
        rows = orders_of(problem.placement, self.starts_us)
        return problem.to_plan(np.array([task for row in rows for task, _ in row], np.int32))


def orders_of(placement: Placement, starts_us: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    """Per rank, the (task, k) in the order of their starts."""
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(placement.num_ranks)]
    for i, (task, starts) in enumerate(zip(placement.tasks, starts_us, strict=True)):
        for rank in task.ranks:
            rows[rank] += [(start, i, k) for k, start in enumerate(starts)]
    return [[(task, k) for _, task, k in sorted(row)] for row in rows]


def find_repeating(
    placement: Placement,
    num_microbatches: int | None = None,
    *,
    time_limit_s: float = 10.0,
) -> Repeating | None:
    """The shortest step whose middle repeats with the least period. Reductions and optimizer steps do not count.

    Args:
        placement: The tasks of one micro-batch, and the cluster with its memory limits.
        num_microbatches: Micro-batches per step; None: the fewest with which the period is the least of all.
        time_limit_s: Nominal seconds of work: the answer is the same on every run unless Ctrl-C stops it.

    Returns:
        The step, or None if none was found.

    Raises:
        SearchError: `num_microbatches` is not a multiple of the data streams, a task has no duration, or transfers hold
            bytes on a rank with a limit, which does not follow from orders.
    """
    num_components = placement.num_components
    refuse_wrong(placement, num_components if num_microbatches is None else num_microbatches, "period", ("period",))
    if num_microbatches is not None and num_microbatches % num_components:
        raise SearchError(f"num_microbatches is {num_microbatches}; give {num_components} or a multiple of it")
    _refuse_unknown(placement)
    budget = Budget(seconds_of(time_limit_s), deterministic=True)
    with ended_by_ctrl_c(budget), watched(lambda: budget.must_stop):
        rounds = _fewest_rounds(placement, budget) if num_microbatches is None else num_microbatches // num_components
        if rounds is None:
            return None
        searched = min(rounds, max(_MOST_OPS // len(placement.tasks), 1))
        steady = _steady(placement, searched, budget)
        flat = None if steady is None else _at_flat_starts(steady.steady, searched, steady.proven_for)
        return None if flat is None else _shortest(flat, budget).unroll(rounds * num_components)


def _refuse_unknown(placement: Placement) -> None:
    for task in placement.tasks:
        if task.duration_us == 0:
            raise SearchError(f"task {task} takes no time, which this search does not know; give it 1 µs or more")
    limits = placement.cluster.limit_bytes
    for route in placement.routes:
        for rank in (route.sender, route.receiver):
            if route.num_bytes and limits[rank] is not None:
                raise SearchError(
                    f"the edge {placement.tasks[route.source]} -> {placement.tasks[route.target]} holds "
                    f"{route.num_bytes} bytes on rank {rank}, which has a limit: this search does not count them; "
                    f"leave the limit out, count them to the tasks, or use find_plan"
                )


def _steady(placement: Placement, rounds: int | None, budget: Budget) -> SteadyResult | None:
    """Uses half of the time, so that some is left for the whole step."""
    share = budget.share(budget.left_s / 2)
    return find_steady(placement, share, microbatches_per_period=1, in_flight=rounds)


def _fewest_rounds(placement: Placement, budget: Budget) -> int | None:
    """How many micro-batches of each component a period of the least length has to mix."""
    free = _steady(placement, None, budget)
    if free is None:
        return None
    least_us = free.steady.period_us
    most = free.steady.latency_us // least_us + 1
    for rounds in range(1, most):
        steady = _steady(placement, rounds, budget)
        if steady is not None and steady.steady.period_us <= least_us:
            return rounds
    return most


def _at_flat_starts(steady: Steady, rounds: int, is_least: bool) -> Repeating | None:
    """Fill and drain as if all micro-batches before and after existed; None if the rhythm cannot be cut that way."""
    model, T = cp_model.CpModel(), steady.period_us
    starts = [row[0] for row in steady.starts_us]
    longest = max(starts) + 2 * T
    turns = [model.new_int_var(-longest // T - 2, longest // T + 2, f"q{i}") for i in range(len(starts))]
    lowered = Problem(steady.placement, 1).placement
    cuts = [model.new_int_var(-2 * longest, 2 * longest, f"cut{r}") for r in range(lowered.num_ranks)]
    first = model.new_int_var(-longest // T - 2, longest // T + 2, "first")
    for task, start, turn in zip(lowered.tasks, starts, turns, strict=True):
        model.add_linear_constraint(turn - first, 0, rounds - 1)
        for rank in task.ranks:
            model.add_linear_constraint(start - T * turn - cuts[rank], 0, T - scalar(task.duration_us))
    status, solver = cpsat.solve(model, Budget(_CUT_S, deterministic=True))
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    last = solver.value(first) + rounds - 1
    middle = tuple(last - solver.value(turn) for turn in turns)
    rows = tuple(tuple(start + k * T for k in range(rounds)) for start in starts)
    return Repeating(steady.placement, T, rows, middle, is_least, False)


def _shortest(flat: Repeating, budget: Budget) -> Repeating:
    """The shortest step found of the same period; not longer than `flat`."""
    best = flat
    with suppress(Stopped):  # what was found by then holds
        best = replace(flat, starts_us=_as_early(flat))
        model = _WholeStep(best)
        budget.spend(model.ordering.nominal_s)
        if model.ordering.is_impossible:
            return best
        model.add_flat_starts()
        model.add_middle()
        model.add_repetition()
        model.ordering.minimize()
        model.hint(best)
        status, solver = cpsat.solve(model.ordering.model, budget)
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            starts_us, middle = model.read(solver)
            best = replace(flat, starts_us=starts_us, middle=middle, is_optimal=status == cp_model.OPTIMAL)
            best = replace(best, starts_us=_as_early(best))
    return best


def _as_early(step: Repeating) -> tuple[tuple[int, ...], ...]:
    """Starts everything as early as these orders allow if the middle is still to repeat."""
    problem = Problem(step.placement, 1)
    width, durations = len(step.starts_us[0]), problem.durations_us.tolist()
    waits = []
    for order in orders_of(problem.placement, step.starts_us):
        nodes = [task * width + k for task, k in order]
        waits += [Wait(a, b, durations[a // width], 0) for a, b in pairwise(nodes)]
        middle = [node for node in nodes if node % width == step.middle[node // width]]
        waits += [Wait(last, middle[0], durations[last // width], 1) for last in middle[-1:]]
    for (source, target), lag in problem.lags_us.items():
        least, (i, j) = durations[source] + lag, (step.middle[source], step.middle[target])
        a, b = source * width, target * width
        waits += [Wait(a + k, b + k, least, 0) for k in range(width)]
        waits.append(Wait(a + i, b + j, least, i - j))
        for k in range(j + 1, i):  # before the middle in the source, after it in the target
            waits += [Wait(a + k, b + j, least, k - j), Wait(a + i, b + k, least, i - k)]
            waits += [Wait(a + k + n, b + k, least, n) for n in range(1, i - k)]
    rhythm = retime(width * len(durations), waits, step.period_us)
    assert rhythm is not None, "the starts as they are fit"
    assert rhythm.period_us == step.period_us, "the starts as they are fit"
    return tuple(rhythm.starts_us[i : i + width] for i in range(0, len(rhythm.starts_us), width))


class _WholeStep:
    """The model of a step that is no longer than `step`. All tasks have a duration, so that a tick is a µs."""

    def __init__(self, step: Repeating) -> None:
        self.problem = Problem(replace(step.placement, step_ends=()), step.num_microbatches)
        critical_path = CriticalPath(self.problem, of_span=False)
        window, value_us = whole_step(critical_path, self.problem.to_orders(step.plan))
        assert value_us is not None
        self.ordering = Ordering(window, 0, value_us)
        assert critical_path.ticks == 1, "tasks take time"
        self.period_us, self.num_rounds = step.period_us, len(step.starts_us[0])
        self.lengths: list[int] = self.problem.durations_us.tolist()
        #: No flat start has to be later: on a path of waits each op comes once, after at most a lag and all rounds.
        rounds_us = self.period_us * self.num_rounds * len(self.lengths)
        self.longest_us = self.num_rounds * (sum(self.lengths) + sum(self.problem.lags_us.values()) + rounds_us)

    def add_flat_starts(self) -> None:
        """Flat starts follow the same orders, and read what is there."""
        model, window = self.ordering.model, self.ordering.window
        self.flat = {node: model.new_int_var(0, self.longest_us, f"flat{node}") for node in window.sequence}
        for a, b, lag in self.ordering.certain.edges:
            model.add(self.flat[b] >= self.flat[a] + window.lengths[a] + lag)
        for (a, b), is_before in self.ordering.literals.items():
            model.add(self.flat[b] >= self.flat[a] + window.lengths[a]).only_enforce_if(is_before)
            model.add(self.flat[a] >= self.flat[b] + window.lengths[b]).only_enforce_if(~is_before)

    def add_middle(self) -> None:
        """One micro-batch of each task is in the middle, which lasts at most a period per rank; the rest is outside."""
        model, rounds = self.ordering.model, range(self.num_rounds)
        self.starts = [[self.flat[node] for node in nodes] for _, nodes in self._nodes()]
        self.is_middle = [[model.new_bool_var(f"m{task}.{k}") for k in rounds] for task, _ in self._nodes()]
        longest = self.longest_us
        self.middle: list[Any] = []  #: its start
        self.index: list[Any] = []
        ranks = range(self.problem.placement.num_ranks)
        windows = [[model.new_int_var(0, longest, f"{name}{rank}") for name in ("from", "to")] for rank in ranks]
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
        """What is read is there in time with any number of periods between fill and drain."""
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

    def _sums(self, row: Sequence[Any], rounds: Callable[[int], range], name: str) -> list[Any]:
        literals = []
        for k in range(len(row)):
            literal = self.ordering.model.new_bool_var(name)
            self.ordering.model.add(literal == sum(row[i] for i in rounds(k)))
            literals.append(literal)
        return literals

    def hint(self, step: Repeating) -> None:
        model = self.ordering.model
        self.ordering.hint()
        for task, row in enumerate(step.starts_us):
            for k, start in enumerate(row):
                model.add_hint(self.starts[task][k], start)
                model.add_hint(self.is_middle[task][k], k == step.middle[task])

    def read(self, solver: cp_model.CpSolver) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
        starts = tuple(tuple(solver.value(start) for start in row) for row in self.starts)
        return starts, tuple([solver.value(chosen) for chosen in row].index(1) for row in self.is_middle)
