"""The model of one period, annealed offsets and retiming."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from rota import Cluster, Costs, place
from rota.search.budget import Budget
from rota.search.periodic.loop import Loop
from rota.search.periodic.modulo import Interval, Period
from rota.search.periodic.offsets import anneal_offsets
from rota.search.periodic.retiming import Wait, retime
from rota.search.periodic.steady import Steady
from support.core_strategies import placed
from support.sampling import some


def v_loop(num_ranks: int, limit: int | None) -> Loop:
    return Loop(place(Costs.uniform(num_ranks, 1, 3), Cluster.uniform(num_ranks, limit)))


def test_the_period_of_fixed_orders_is_the_largest_ratio_of_time_to_rounds():
    waits = [Wait(0, 1, 5, 0), Wait(1, 0, 6, 2), Wait(1, 2, 1, 0), Wait(2, 1, 3, 1)]
    rhythm = retime(3, waits)
    assert rhythm is not None
    assert rhythm.period_us == 6  # 11 / 2, in whole µs
    for source, target, least, rounds in waits:
        assert rhythm.starts_us[target] >= rhythm.starts_us[source] + least - rhythm.period_us * rounds


def test_a_cycle_within_one_round_has_no_period():
    assert retime(2, [Wait(0, 1, 1, 0), Wait(1, 0, 1, 0)]) is None


def test_at_the_same_instant_who_is_waited_for_comes_first():
    rhythm = retime(3, [Wait(2, 1, 0, 0), Wait(1, 0, 0, 0), Wait(0, 2, 4, 1)])
    assert rhythm is not None
    assert rhythm.ties[2] < rhythm.ties[1] < rhythm.ties[0]


@pytest.mark.parametrize(("limit", "period"), [(4, 4), (3, 8), (2, 8), (1, 16)])
def test_one_micro_batch_a_period_is_proven(limit: int, period: int):
    loop = v_loop(4, limit)
    below = Period(Interval(loop, 1, period - 1)).solve(Budget(1))
    found = Period(Interval(loop, 1, period)).solve(Budget(1)).rhythm
    assert below.rhythm is None
    assert below.is_proven
    assert found is not None
    assert found.period_us == period


def test_three_micro_batches_a_period_use_memory_that_one_cannot():
    found = Period(Interval(v_loop(4, 3), 3, 16)).solve(Budget(5)).rhythm
    assert found is not None
    Steady.of(v_loop(4, 3).placement, 3, found).verify()


@settings(max_examples=some(12), deadline=None)
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
