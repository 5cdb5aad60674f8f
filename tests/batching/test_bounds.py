"""No bound is above the optimum of the plans that it is about, and plans are close to it."""

import numpy as np
import pytest

from batching.steps import chain, optimum_us
from rota.batching.bounds import of_any_sequence, of_grouping
from rota.batching.climbing import climb
from rota.batching.dispatching import by_policy, valley
from rota.batching.replaying import fits
from rota.batching.windows import sequence_bound_us

FEW = [(seed, ranks, 4, split, flight, giants) for seed, ranks, split, flight, giants in (
    (0, 2, False, 2.0, 0), (1, 3, False, 3.0, 0), (2, 3, False, 2.2, 1), (3, 3, True, 3.0, 0), (4, 2, True, 2.0, 1),
    (5, 3, True, 2.4, 0),
)]  # fmt: skip
MANY = [
    (seed, 2 + seed % 3, 4 + seed % 4, bool(seed % 2), 1.5 + seed % 5 / 2, seed % 3) for seed in range(100, 160)
]  # fmt: skip
CASES = [*FEW, *(pytest.param(*case, marks=pytest.mark.sweep) for case in MANY)]
NAMES = ("seed", "ranks", "count", "split", "in_flight", "giants")


@pytest.mark.parametrize(NAMES, CASES)
def test_bounds_of_a_grouping_and_of_a_sequence(
    seed: int, ranks: int, count: int, split: bool, in_flight: float, giants: int
) -> None:
    problem = chain(seed, ranks, count, split, in_flight, giants)
    best_us = optimum_us(problem)
    if best_us is None:
        pytest.skip("CP-SAT did not close it")
    highest_us = max(bound.us for bound in of_grouping(problem))
    assert highest_us <= best_us
    for sequence in (valley(problem), np.random.default_rng(seed).permutation(count)):
        exact_us = optimum_us(problem, sequence.tolist())
        if exact_us is None:
            continue
        assert best_us <= exact_us
        for lowest_us in (0, highest_us):
            assert sequence_bound_us(problem, sequence, lowest_us, exact_us) <= exact_us
            assert sequence_bound_us(problem, sequence, lowest_us, exact_us + 7) <= exact_us
            assert sequence_bound_us(problem, sequence, lowest_us, 2 * exact_us) <= exact_us
        assert max((bound.us for bound in of_any_sequence(problem)), default=0) <= exact_us


def test_a_giant_that_fills_the_memory_makes_its_rank_wait() -> None:
    problem = chain(0, 3, 4, False, 1.0, giants=1)
    assert max(b.us for b in of_any_sequence(problem)) > max(b.us for b in of_grouping(problem) if "work" in b.why)


@pytest.mark.parametrize("seed", range(6))
def test_local_search_never_makes_a_step_longer(seed: int) -> None:
    problem = chain(seed, 3, 9, bool(seed % 2), 2.5, giants=seed % 3)
    sequence = np.random.default_rng(seed).permutation(9)
    first = by_policy(problem, sequence)
    assert first is not None
    last_us = first.makespan_us
    for tries in (10, 100, 1_000):
        climbed, timed = climb(problem, sequence, first, 0, tries)
        assert sorted(climbed.tolist()) == [*range(9)]
        assert fits(problem.tables, problem.limits_bytes, climbed, timed.orders, -1)
        assert timed.makespan_us <= last_us
        last_us = timed.makespan_us
    assert climb(problem, sequence, first, 0, 1_000, is_over=lambda: True)[1].makespan_us == first.makespan_us


def test_the_bound_of_a_sequence_is_close_to_its_optimum() -> None:
    far = []
    for case in FEW:
        problem = chain(*case)
        exact_us = optimum_us(problem, valley(problem).tolist())
        assert exact_us is not None
        far.append(1 - sequence_bound_us(problem, valley(problem), 0, exact_us) / exact_us)
    assert np.mean(far) <= 0.02, far
