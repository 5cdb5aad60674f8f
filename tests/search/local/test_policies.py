"""Climbing over policies: figures, limits, and the same answer every time."""

from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.placing import wave
from rota.search.local.policies import Climb
from rota.search.problem import Problem
from rota.search.timing import fits, score


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
    assert climb.key is not None
    assert climb.key[0] <= 2_500_000
