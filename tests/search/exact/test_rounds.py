"""All states of long steps, round by round: the optimum, its plan, and bounds before all rounds are done."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest

from rota.core.checking import check
from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.placing import place
from rota.core.simulation import simulate
from rota.search import bounds
from rota.search.budget import Budget
from rota.search.exact.rounds import Rounds
from rota.search.problem import Problem
from search.exact.test_states import searched
from support.tessel_shapes import tessel


def solved(problem: Problem) -> Rounds:
    """The whole search."""
    rounds = Rounds(problem)
    assert not rounds.is_over
    rounds.run(1 << 60, Budget(60, deterministic=True))
    assert rounds.is_over
    return rounds


@pytest.mark.parametrize(
    ("shape", "num_ranks", "limit", "num_microbatches", "us"),
    [
        ("x", 4, 2, 8, 55),
        ("x", 4, 2, 16, 107),
        ("x", 2, 1, 8, 57),
        ("nn", 4, 3, 8, 89),
        ("nn", 4, 3, 128, 1349),
        ("nn", 8, 3, 64, 995),
        ("m", 4, 3, 128, 948),
    ],
)
def test_long_steps_are_solved(shape: str, num_ranks: int, limit: int, num_microbatches: int, us: int) -> None:
    problem = Problem(tessel(shape, num_ranks, limit), num_microbatches)
    found = solved(problem)
    assert found.bound_us == us >= bounds.best(problem).us
    assert found.orders is not None
    plan = problem.to_plan(found.orders)
    check(plan)
    assert simulate(plan).makespan_us == us
    if num_microbatches <= 8:
        assert searched(problem, us + 1).bound_us == us


def test_times_that_are_no_small_numbers() -> None:
    costs = Costs((18_500, 21_001, 7), (30_011, 29_850, 1_000_003), (5, 44_444, 18_500), activation_bytes=2)
    problem = Problem(place(costs, Cluster.uniform(3, 4)), 3)
    found = solved(problem)
    proven = searched(problem, found.bound_us + 1)
    assert proven.bound_us == found.bound_us
    assert found.orders is not None
    assert simulate(problem.to_plan(found.orders)).makespan_us == found.bound_us


@pytest.mark.parametrize(("shape", "num_ranks", "limit"), [("x", 4, 2), ("nn", 4, 3)])
def test_a_few_rounds_bound_long_steps(shape: str, num_ranks: int, limit: int) -> None:
    num_microbatches = 300
    problem = Problem(tessel(shape, num_ranks, limit), num_microbatches)
    exact_us = solved(problem).bound_us
    rounds = Rounds(problem)
    while rounds.values is None:
        rounds.run(1 << 60, Budget(0.001, deterministic=True))
    seen = []
    for _ in range(40):
        rounds.values.go_on()
        seen.append(rounds.values.bound(num_microbatches))
    us = [rounds.together_us + rounds.unit_us * bound for bound in seen]
    assert max(us) <= exact_us
    assert us[-1] >= Fraction(99, 100) * exact_us


def test_the_end_is_in_sight_before_it_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rota.search.exact.rounds._AT_ONCE", 50)
    rounds = Rounds(Problem(tessel("nn", 4, 3), 128))
    exploring, afterwards = [], []
    while True:
        rounds.run(1 << 60, Budget(1e-6, deterministic=True))
        if rounds.is_over:
            break
        (exploring if rounds.values is None else afterwards).append(rounds.left_s())
    assert exploring[0] is None
    assert exploring[-1] is not None
    assert all(late < early for early, late in pairwise(afterwards))
    assert rounds.left_s() is None


@pytest.mark.parametrize("limit", [None, 30])
def test_steps_with_too_many_states_are_left_alone(limit: int | None) -> None:
    assert Rounds(Problem(tessel("x", 8, limit), 64)).is_over


def test_no_room_for_more_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rota.search.exact.rounds._MOST_BYTES", 100_000)
    rounds = Rounds(Problem(tessel("x", 4, 3), 64))
    rounds.run(1 << 60, Budget(60, deterministic=True))
    assert rounds.is_over
    assert rounds.bound_us == 0
    assert rounds.orders is None
