"""Local search: never worse, always within memory, the same every time."""

import random
from functools import partial
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings

from rota import Cluster, Costs, Plan, check, place, wave
from rota.schedules import one_f_one_b, zb_h1, zb_h2
from rota.search.budget import Budget
from rota.search.dispatching import Memory, serial
from rota.search.local.improving import improve
from rota.search.local.moves import Goal, State, anneal
from rota.search.local.neighbourhood import improve as improve_windows
from rota.search.local.policies import Climb
from rota.search.problem import Orders, Problem
from rota.search.timing import Score, Tables, fits, peaks, score
from support import core_strategies as strategies
from support.core_strategies import with_limits
from support.sampling import some
from support.search_brute_force import tiny_cases


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
        assert timed.span_us <= other.span_us
    assert fits(problem, improved)


# --- windows of given orders, reordered: never worse, within memory, and the best where one window is all -------------


def _value(problem: Problem, orders: Orders, objective: str = "makespan") -> int:
    timed = score(problem, orders)
    return timed.makespan_us if objective == "makespan" else timed.span_us


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_finds_the_best_of_tiny_steps(objective: Literal["makespan", "span"]) -> None:
    chooser = random.Random(2)
    for placement, num_microbatches, best in tiny_cases(some(40), seed=8):
        if best is None:
            continue
        problem, least = Problem(placement, num_microbatches), getattr(best, f"{objective}_us")
        orders = problem.to_orders(chooser.choice(best.fitting))
        better = improve_windows(problem, orders, objective, least, Budget(0.1, deterministic=True))
        check(problem.to_plan(better))
        assert least <= _value(problem, better, objective) <= _value(problem, orders, objective)
        if objective == "makespan":  # windows of a span leave the first starts where they are
            assert _value(problem, better) == least


# --- climbing over policies: figures, limits, and the same answer every time ------------------------------------------


def half_memory(num_ranks: int, num_microbatches: int) -> Problem:
    """A wave in half the memory of 1F1B, where V-Min is the best named schedule."""
    costs = Costs.uniform(2 * num_ranks, 5_000, 6_000, 6_000, activation_bytes=2)
    return Problem(wave(costs, Cluster.uniform(num_ranks, 2 * num_ranks)), num_microbatches)


def climbed(problem: Problem, tries: int, seed: int = 0) -> Climb:
    climb = Climb(problem, False, seed)
    for _ in range(tries):
        climb.try_one()
    return climb


def test_what_is_found_fits_and_lasts_as_long_as_is_said() -> None:
    climb = climbed(half_memory(8, 32), 200)
    assert climb.orders is not None
    assert climb.key is not None
    assert fits(climb.problem, climb.orders)
    assert score(climb.problem, climb.orders) == climb.key


def test_caps_that_fill_the_memory_of_each_rank_keep_a_wave_busy() -> None:
    """V-Min needs 2,626,000 µs here; no plan needs less than 2,427,000."""
    climb = climbed(half_memory(16, 64), 100)
    assert climb.key[0] <= 2_500_000
