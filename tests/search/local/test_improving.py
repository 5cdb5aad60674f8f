"""Local search: never worse, always within memory, the same every time."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings

from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.placing import place
from rota.core.plan import Plan
from rota.schedules import one_f_one_b, zb_h1, zb_h2
from rota.search.budget import Budget
from rota.search.dispatching import Memory, serial
from rota.search.local.improving import improve
from rota.search.local.moves import Goal, State, anneal
from rota.search.local.policies import Climb
from rota.search.problem import Problem
from rota.search.timing import Score, Tables, fits, peaks, score
from support import core_strategies as strategies
from support.core_strategies import with_limits
from support.sampling import some


@given(strategies.plans())
@settings(max_examples=some(40))
def test_moves_keep_times_exact_and_memory_within_limits(plan: Plan) -> None:
    problem = Problem(plan.placement, plan.num_microbatches)
    orders = problem.to_orders(plan)
    held = peaks(problem, orders).tolist()
    limits = [peak + static for peak, static in zip(held, plan.placement.static_bytes, strict=True)]
    problem = Problem(with_limits(plan, limits).placement, plan.num_microbatches)
    for is_span in (False, True):
        state, first = State.of(problem, orders, 1), score(problem, orders)
        assert first is not None
        best = np.array(first[::-1] if is_span else first)
        heats = np.array([2.0, 1.0])
        goal = Goal(is_span, best, 0)
        anneal(Tables.of(problem), problem.step_ends, Memory.of(problem), state, goal, heats, 3_000)
        for improved in (state.best, state.orders):
            assert fits(problem, improved)
        assert score(problem, state.best) == Score(*(best[::-1] if is_span else best).tolist())
        assert tuple(best) <= (first[::-1] if is_span else first)


def uneven(limit_bytes: int) -> Problem:
    costs = Costs((18, 21, 17, 20), (18, 20, 17, 21), (9, 11, 8, 10), activation_bytes=2)
    return Problem(place(costs, Cluster.uniform(4, limit_bytes, latency_us=1)), 8)


@pytest.mark.parametrize("limit_bytes", [8, 12, 16])
def test_no_worse_than_zero_bubble_by_hand(limit_bytes: int) -> None:
    problem = uneven(limit_bytes)
    by_hand = [problem.to_orders(schedule(problem.placement, 8)) for schedule in (zb_h1, zb_h2, one_f_one_b)]
    improved = improve(Climb(problem, True, 0), serial(problem), 0, Budget(0.3, deterministic=True))
    timed = score(problem, improved)
    assert timed is not None
    for orders in filter(partial(fits, problem), by_hand):
        other = score(problem, orders)
        assert other is not None
        assert timed.span_us <= other.span_us
    assert fits(problem, improved)
