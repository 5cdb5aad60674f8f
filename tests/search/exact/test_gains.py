"""The bound from states of faster steps: never above the optimum, close to it, and above the closed forms."""

from __future__ import annotations

from fractions import Fraction
from random import Random

import pytest

from rota.costs import Cluster, Costs
from rota.placement import Placement
from rota.placing import place
from rota.search import bounds
from rota.search.budget import Budget
from rota.search.exact.gains import Gains
from rota.search.exact.rounds import Rounds
from rota.search.problem import Problem
from rota.shapes import SHAPES
from search.exact.test_rounds import solved
from search.exact.test_states import searched
from support.tessel_shapes import tessel


def proven(problem: Problem, most_us: int = 1 << 60) -> int:
    """The highest bound that is reached."""
    gains = Gains(problem, Rounds(problem))
    assert not gains.is_over
    gains.run(max(bounds.best(problem).us // 2, 1), most_us, Budget(60, deterministic=True))
    assert gains.is_over
    return gains.bound_us


@pytest.mark.parametrize(("num_ranks", "limit", "num_microbatches"), [(2, 1, 8), (4, 2, 16), (4, 2, 200)])
def test_two_streams_in_little_memory(num_ranks: int, limit: int, num_microbatches: int) -> None:
    problem = Problem(tessel("x", num_ranks, limit), num_microbatches)
    exact_us = solved(problem).bound_us
    bound_us = proven(problem)
    assert bounds.best(problem).us < bound_us <= exact_us
    if num_microbatches >= 100:  # what begins and ends a step is not seen
        assert bound_us >= Fraction(97, 100) * exact_us


def random_placement(chooser: Random) -> Placement:
    """A chain or two streams on 2 or 3 ranks, with small times of any kind and the least memory or a little more."""
    num_ranks = chooser.choice([2, 3])
    times = [[chooser.randint(1, 4) for _ in range(num_ranks)] for _ in range(2)]
    costs = Costs(times[0], times[1], activation_bytes=1)
    cluster = Cluster(tuple(chooser.randint(2, 3) for _ in range(num_ranks)))
    return place(costs, cluster) if chooser.random() < 0.4 else SHAPES["x"].place(costs, cluster)


@pytest.mark.parametrize("seed", range(10))
def test_no_bound_is_above_the_best_plan(seed: int) -> None:
    problem = Problem(random_placement(Random(seed)), 6)
    exact_us = searched(problem, 1 << 30).bound_us
    assert 0 < proven(problem, 2 * exact_us) <= exact_us


def test_problems_that_are_left_alone() -> None:
    without_limit = tessel("x", 4)
    long_ops = place(Costs((1, 1), (3, 100), activation_bytes=1), Cluster.uniform(2, 2))
    split = place(Costs((1, 1), (1, 1), (1, 1), activation_bytes=1), Cluster.uniform(2, 2))
    for placement in (without_limit, long_ops, split):
        problem = Problem(placement, 8)
        assert Gains(problem, Rounds(problem)).is_over


def test_no_room_for_more_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rota.search.exact.gains._MOST_STATES", 1024)
    problem = Problem(tessel("x", 6, 3), 64)
    gains = Gains(problem, Rounds(problem))
    monkeypatch.setattr("rota.search.exact.gains._FIRST_STATES", 512)
    gains.run(bounds.best(problem).us, 1 << 60, Budget(60, deterministic=True))
    assert gains.is_over
    assert gains.bound_us == bounds.best(problem).us
