"""Climbing over policies: caps reach what limits in bytes alone do not, and the same tries give the same answer."""

from __future__ import annotations

import pytest

from rota.costs import Cluster, Costs
from rota.placing import wave
from rota.schedules import v_min
from rota.search.local.policies import Climb
from rota.search.problem import Problem
from rota.search.timing import fits, score
from rota.simulation import simulate
from support.tessel_shapes import tessel


def half_memory(num_ranks: int, num_microbatches: int) -> Problem:
    """A wave in half the memory of 1F1B, where V-Min is the best named schedule."""
    costs = Costs.uniform(2 * num_ranks, 5_000, 6_000, 6_000, activation_bytes=2)
    return Problem(wave(costs, Cluster.uniform(num_ranks, 2 * num_ranks)), num_microbatches)


def climbed(problem: Problem, tries: int, seed: int = 0) -> Climb:
    climb = Climb(problem, False, seed)
    for _ in range(tries):
        climb.try_one()
    return climb


def test_a_wave_in_half_the_memory_is_faster_than_v_min() -> None:
    problem = half_memory(8, 32)
    climb = climbed(problem, 400)
    assert climb.orders is not None
    assert climb.key is not None
    assert fits(problem, climb.orders)
    assert score(problem, climb.orders) == climb.key
    assert climb.key[0] < simulate(v_min(problem.placement, 32)).makespan_us


def test_with_caps_the_climb_gets_further_than_without() -> None:
    problem = Problem(tessel("nn", 8, 6), 64)
    with_caps, without = Climb(problem, False, 0), Climb(problem, False, 0)
    without.capped = without.capped[:0]
    without.plain = without._plain()
    for climb in (with_caps, without):
        for _ in range(300):
            climb.try_one()
    assert with_caps.key is not None
    assert without.key is not None
    assert with_caps.key < without.key


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_every_time(seed: int) -> None:
    first, second = (climbed(half_memory(4, 12), 150, seed) for _ in range(2))
    assert first.key == second.key
    assert first.orders is not None
    assert second.orders is not None
    assert (first.orders == second.orders).all()


def test_no_more_is_held_than_the_limit_where_nothing_is_kept_between_forward_and_backward() -> None:
    placement = tessel("x", 4, 2)
    climb = climbed(Problem(placement, 8), 50)
    assert climb.orders is not None
    assert fits(climb.problem, climb.orders)
