"""The compiled replay against the simulator: times, memory, and what transfers hold."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rota import Plan, PlanError, simulate
from rota.search.dispatching import Dispatcher, backwards, serial
from rota.search.problem import NO_LIMIT, Problem
from rota.search.timing import Score, Tables, fits, peaks, score, start_times
from rota.search.transfer_levels import Transfers, counting_transfers, peaks_with_transfers
from support import core_strategies as strategies
from support.core_strategies import with_limits
from support.sampling import some


@given(strategies.plans())
def test_a_cycle_is_none(plan: Plan) -> None:
    """Any order at all: the same answer as the simulator's, an error or times."""
    problem = Problem(plan.placement, plan.num_microbatches)
    orders = problem.to_orders(plan)
    for first, end in zip(problem.first_op[:-1], problem.first_op[1:], strict=True):
        row = orders[first:end].tolist()
        random.Random(plan.num_microbatches).shuffle(row)
        orders[first:end] = row
    timed = score(problem, orders)
    if timed is None:
        with pytest.raises(PlanError, match="cycle"):
            simulate(problem.to_plan(orders))
    else:
        timeline = simulate(problem.to_plan(orders))
        assert timed == Score(timeline.makespan_us, timeline.span_us)


@given(strategies.plans())
def test_memory_is_the_timelines_where_transfers_hold_nothing(plan: Plan) -> None:
    edges = tuple(edge._replace(num_bytes=0) for edge in plan.placement.edges)
    problem = Problem(replace(plan.placement, edges=edges), plan.num_microbatches)
    orders = problem.to_orders(plan)
    held = simulate(problem.to_plan(orders)).peak_memory_bytes
    most = peaks(problem, orders) + problem.placement.static_bytes
    assert most.tolist() == list(held)
    for less, outcome in ((0, True), (1, False)) if min(held) else ():
        limited = with_limits(problem.to_plan(orders), [peak - less for peak in held]).placement
        assert fits(Problem(limited, plan.num_microbatches), orders) == outcome


def in_turn(plan: Plan) -> tuple[Problem, Plan]:
    """The plan with the micro-batches of each task in turn."""
    problem = Problem(replace(plan.placement, static_bytes=(0,) * plan.num_ranks), plan.num_microbatches)
    return problem, problem.to_plan(problem.to_orders(plan))


@given(strategies.plans(most_microbatches=5))
@settings(max_examples=some(300))
def test_peaks_are_the_simulators(given_plan: Plan) -> None:
    unlimited = strategies.with_limits(given_plan, [None] * given_plan.num_ranks)
    problem, plan = in_turn(unlimited)
    held = simulate(plan).peak_memory_bytes
    limited = Problem(strategies.with_limits(plan, held).placement, plan.num_microbatches)
    orders, tables = limited.to_orders(plan), Tables.of(limited)
    starts_us = start_times(tables, orders)
    assert starts_us is not None
    assert tuple(peaks_with_transfers(tables, Transfers.of(limited), orders, starts_us)) == held
    without = np.zeros(plan.num_ranks, np.int64)
    free = Transfers.of(problem)
    assert (peaks_with_transfers(Tables.of(problem), free, orders, starts_us) == without).all()


@given(strategies.plans(most_microbatches=5))
@settings(max_examples=some(200))
def test_counted_peaks_are_part_of_what_is_held(given_plan: Plan) -> None:
    problem, plan = in_turn(given_plan)
    counted = counting_transfers(problem)
    orders = problem.to_orders(plan)
    assert (peaks(counted, orders) >= peaks(problem, orders)).all()
    assert (peaks(counted, orders) <= simulate(plan).peak_memory_bytes).all()


# --- list scheduling never breaks the limit and never gets stuck where one micro-batch at a time fits -----------------


def tightest(plan: Plan) -> Problem:
    """As much memory as one micro-batch at a time needs."""
    problem = Problem(plan.placement, plan.num_microbatches)
    static = plan.placement.static_bytes
    limits = [int(peak) + more for peak, more in zip(peaks(problem, serial(problem)), static, strict=True)]
    return Problem(with_limits(plan, limits).placement, plan.num_microbatches)


def leaves_bytes_behind(problem: Problem) -> bool:
    """Whether a micro-batch, once done, still holds memory on some rank."""
    left: Counter[tuple[int, int]] = Counter()
    for stream, task in zip(problem.placement.component_of, problem.placement.tasks, strict=True):
        for rank in task.ranks:
            left[rank, stream] += task.held_bytes
    return any(num_bytes > 0 for num_bytes in left.values())


@given(strategies.plans(), st.integers(0, 2**16), st.sampled_from((0.0, 0.5, 3.0)))
def test_any_priorities_make_orders_that_fit(plan: Plan, seed: int, patience: float) -> None:
    """With tight memory too, unless what micro-batches leave behind for good fills it in an unlucky order."""
    for problem in (Problem(plan.placement, plan.num_microbatches), tightest(plan)):
        priorities = np.random.default_rng(seed).random(problem.first_node[-1])
        orders = Dispatcher(problem)(priorities, patience)
        if orders is None:
            assert leaves_bytes_behind(problem)
            assert (problem.limits_bytes < NO_LIMIT).any()
            continue
        assert fits(problem, orders)
        assert score(problem, orders) is not None


@given(strategies.plans(), st.integers(0, 2**16))
def test_caps_hold_and_never_get_stuck(plan: Plan, seed: int) -> None:
    problem, random = tightest(plan), np.random.default_rng(seed)
    caps = random.integers(1, 4, len(problem.counts))
    orders = Dispatcher(problem)(random.random(problem.first_node[-1]), 0.5, None, caps)
    if orders is None:
        assert leaves_bytes_behind(problem)
        return
    assert fits(problem, orders)
    for task, backward in enumerate(backwards(problem)):
        if backward >= 0:
            rank = problem.ranks[task][0]
            row = orders[problem.first_op[rank] : problem.first_op[rank + 1]]
            in_flight = np.cumsum((row == task).astype(int) - (row == backward))
            assert in_flight.max(initial=0) <= caps[task]
