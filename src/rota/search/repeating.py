"""A step with a middle that can be done again and again: fill, one period of a steady state, drain.

Lin et al., "Tessel: Boosting Distributed Execution of Large DNN Models via Flexible Schedule Search", HPCA 2024, search
the three one by one and put them end to end. Here the least period is found first; then one model has the whole step,
in which fill, period and drain of different ranks overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from ortools.sat.python import cp_model

from rota.errors import SearchError
from rota.placement import Placement
from rota.plan import Plan
from rota.search.budget import Budget
from rota.search.composing import compose
from rota.search.exact import cpsat
from rota.search.finding import compile_once
from rota.search.periodic.retiming import Wait, retime
from rota.search.periodic.steady_search import SteadyResult, find_steady
from rota.search.periodic.steady_state import Steady
from rota.search.problem import Problem
from rota.search.validation import refuse_wrong, seconds_of
from rota.simulation import simulate
from rota.stopping import Stopped, ended_by_ctrl_c, watched
from rota.tasks import Op

_CUT_S = 1.0  # nominal, for CP-SAT to cut a rhythm whose period is known
_MOST_OPS = 512  # of one model; of a longer step a shorter one is searched, and its middle repeated


@dataclass(frozen=True)
class Repeating:
    """`starts_us[i][k]`: when task i does the k-th micro-batch of its stream; `middle[i]`: the k that is repeated.

    With more micro-batches the tasks of the middle are done again `period_us` later, and what follows is put off by as
    much. A plan runs its ops as soon as it can, which may be sooner than at `starts_us`: those leave room for more
    periods. `is_least`: it is proven that no step of as many micro-batches has a middle of a shorter period;
    `is_optimal`: that no step whose middle repeats with this period is shorter as a whole.
    """

    placement: Placement
    period_us: int
    starts_us: tuple[tuple[int, ...], ...]
    middle: tuple[int, ...]
    is_least: bool
    is_optimal: bool

    @property
    def num_microbatches(self) -> int:
        return len(self.starts_us[0]) * self.placement.num_components

    @cached_property
    def makespan_us(self) -> int:
        """Of `plan`, as simulated without reductions and optimizer steps."""
        return simulate(replace(self.plan, placement=replace(self.placement, step_ends=()))).makespan_us

    def unroll(self, num_microbatches: int) -> Repeating:
        """With the middle repeated. Raises SearchError for fewer micro-batches than there are, or part of a round."""
        streams = self.placement.num_components
        more, rest = divmod(num_microbatches - self.num_microbatches, streams)
        if more < 0 or rest:
            raise SearchError(
                f"num_microbatches is {num_microbatches}: this step has {self.num_microbatches} micro-batches, and can "
                f"take any number of {streams} more"
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
        tasks, streams = self.placement.tasks, self.placement.num_components

        def op(task: int, k: int) -> Op:
            stage, kind = tasks[task].stage, tasks[task].kind
            return Op(stage, kind, k * streams + self.placement.component_of[task])

        orders = orders_of(self.placement, self.starts_us)
        return Plan(self.placement, self.num_microbatches, tuple(tuple(op(*pair) for pair in row) for row in orders))


def orders_of(placement: Placement, starts_us: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    """For each rank the (task, k) in the order of their starts."""
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
    seed: int = 0,
) -> Repeating | None:
    """The shortest step of `num_microbatches` whose middle repeats with the least period; None if none was found.

    Default: the fewest micro-batches with which the period is the least of all. Reductions and optimizer steps are not
    counted. `time_limit_s` counts nominal seconds: the answer is the same on every run, if not stopped by Ctrl-C.
    Raises SearchError for a `num_microbatches` that is no multiple of the streams, for tasks that take no time, and
    where transfers hold bytes on a rank with a limit, which orders do not tell.
    """
    streams = placement.num_components
    refuse_wrong(placement, streams if num_microbatches is None else num_microbatches, "period", ("period",))
    if num_microbatches is not None and num_microbatches % streams:
        raise SearchError(f"num_microbatches is {num_microbatches}; give {streams} or a multiple of it")
    _refuse_unknown(placement)
    seconds = seconds_of(time_limit_s)
    compile_once()
    budget = Budget(seconds, deterministic=True)
    with ended_by_ctrl_c(budget), watched(lambda: budget.must_stop):
        rounds = _fewest_rounds(placement, budget, seed) if num_microbatches is None else num_microbatches // streams
        if rounds is None:
            return None
        searched = min(rounds, max(_MOST_OPS // len(placement.tasks), 1))
        found = _steady(placement, searched, budget, seed)
        flat = None if found is None else _at_flat_starts(found.steady, searched, found.proven_for)
        return None if flat is None else _shortest(flat, budget, seed).unroll(rounds * streams)


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


def _steady(placement: Placement, rounds: int | None, budget: Budget, seed: int) -> SteadyResult | None:
    """In part of the time, or nothing would be left for the whole."""
    share = budget.share(budget.left_s / 2)
    return find_steady(placement, share, microbatches_per_period=1, in_flight=rounds, seed=seed)


def _fewest_rounds(placement: Placement, budget: Budget, seed: int) -> int | None:
    """Micro-batches of each stream that a period of the least length has to mix."""
    free = _steady(placement, None, budget, seed)
    if free is None:
        return None
    least_us = free.steady.period_us
    most = free.steady.latency_us // least_us + 1
    for rounds in range(1, most):
        found = _steady(placement, rounds, budget, seed)
        if found is not None and found.steady.period_us <= least_us:
            return rounds
    return most


def _at_flat_starts(steady: Steady, rounds: int, is_least: bool) -> Repeating | None:
    """Fill and drain as if all micro-batches before and after were there; None if the rhythm cannot be cut so."""
    model, T = cp_model.CpModel(), steady.period_us
    starts = [row[0] for row in steady.starts_us]
    longest = max(starts) + 2 * T
    turns = [model.new_int_var(-longest // T - 2, longest // T + 2, f"q{i}") for i in range(len(starts))]
    cuts = [model.new_int_var(-2 * longest, 2 * longest, f"cut{r}") for r in range(steady.placement.num_ranks)]
    first = model.new_int_var(-longest // T - 2, longest // T + 2, "first")
    for task, start, turn in zip(steady.placement.tasks, starts, turns, strict=True):
        model.add_linear_constraint(turn - first, 0, rounds - 1)
        for rank in task.ranks:
            model.add_linear_constraint(start - T * turn - cuts[rank], 0, T - task.duration_us)
    status, solver = cpsat.solve(model, Budget(_CUT_S, deterministic=True))
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    last = solver.value(first) + rounds - 1
    middle = tuple(last - solver.value(turn) for turn in turns)
    rows = tuple(tuple(start + k * T for k in range(rounds)) for start in starts)
    return Repeating(steady.placement, T, rows, middle, is_least, False)


def _shortest(flat: Repeating, budget: Budget, seed: int) -> Repeating:
    """Of the same period; not longer than `flat`."""
    best = flat
    try:
        best = early = replace(flat, starts_us=_as_early(flat))
        found = compose(early.plan, early.period_us, early.starts_us, early.middle, budget, seed)
        if found is not None:
            best = replace(flat, starts_us=found.starts_us, middle=found.middle, is_optimal=found.is_optimal)
            best = replace(best, starts_us=_as_early(best))
    except Stopped:
        pass  # what there was by then holds
    return best


def _as_early(step: Repeating) -> tuple[tuple[int, ...], ...]:
    """Everything as early as it may be in these orders, so that the middle still repeats."""
    width, durations = len(step.starts_us[0]), [task.duration_us for task in step.placement.tasks]
    waits = []
    for order in orders_of(step.placement, step.starts_us):
        nodes = [task * width + k for task, k in order]
        waits += [Wait(a, b, durations[a // width], 0) for a, b in pairwise(nodes)]
        middle = [node for node in nodes if node % width == step.middle[node // width]]
        waits += [Wait(last, middle[0], durations[last // width], 1) for last in middle[-1:]]
    for (source, target), lag in Problem(step.placement, 1).lags_us.items():
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
