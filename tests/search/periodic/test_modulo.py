"""The model of one period, annealed offsets and retiming."""

import pytest
from hypothesis import given, settings

from rota import Cluster, Costs, place
from rota.search.budget import Budget
from rota.search.periodic.loop import Loop
from rota.search.periodic.modulo import Interval, Period
from rota.search.periodic.offsets import anneal_offsets
from rota.search.periodic.steady import Steady
from support.core_strategies import placed
from support.sampling import some


def v_loop(num_ranks: int, limit: int | None) -> Loop:
    return Loop(place(Costs.uniform(num_ranks, 1, 3), Cluster.uniform(num_ranks, limit)))


@pytest.mark.parametrize(("limit", "period"), [(4, 4), (3, 8), (2, 8), (1, 16)])
def test_one_micro_batch_a_period_is_proven(limit: int, period: int):
    loop = v_loop(4, limit)
    below = Period(Interval(loop, 1, period - 1)).solve(Budget(1))
    rhythm = Period(Interval(loop, 1, period)).solve(Budget(1)).rhythm
    assert below.rhythm is None
    assert below.is_proven
    assert rhythm is not None
    assert rhythm.period_us == period


def test_three_micro_batches_a_period_use_memory_that_one_cannot():
    rhythm = Period(Interval(v_loop(4, 3), 3, 16)).solve(Budget(5)).rhythm
    assert rhythm is not None
    Steady.of(v_loop(4, 3).placement, 3, rhythm).verify()


@settings(max_examples=some(12))
@given(placed())
def test_what_is_found_is_true_for_any_placement(placement):
    loop = Loop(placement)
    work_us = max(sum(loop.durations_us[task] for task in tasks) for tasks in loop.tasks_on)
    interval = Interval(loop, 2, max(2 * work_us, 1) + 3)
    for rhythm in (
        Period(interval).solve(Budget(0.2, deterministic=True)).rhythm,
        anneal_offsets(interval, Budget(0.001, deterministic=True)),
    ):
        if rhythm is not None:
            Steady.of(placement, 2, rhythm).verify()
