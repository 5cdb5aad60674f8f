"""The compiled replay against the simulator."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings

from rota.core.errors import PlanError
from rota.core.plan import Plan
from rota.core.simulation import simulate
from rota.search.problem import Problem
from rota.search.timing import Score, fits, peaks, score
from support import core_strategies as strategies
from support.core_strategies import with_limits


@given(strategies.plans())
@settings(deadline=None)
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
@settings(deadline=None)
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
