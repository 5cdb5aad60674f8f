"""Steady states from within plans."""

from __future__ import annotations

import pytest

from rota import Cluster, Costs, Placement, Plan, check, interleaved, place, wave
from rota.schedules import interleaved_one_f_one_b, one_f_one_b, v_min
from rota.search.budget import Budget
from rota.search.periodic.from_plan import steady_within
from rota.search.problem import Problem
from rota.search.timing import Tables, start_times


def within(problem: Problem, plan: Plan):
    starts = start_times(Tables.of(problem), problem.to_orders(plan))
    assert starts is not None
    return steady_within(problem, starts, Budget(60, deterministic=True))


@pytest.mark.parametrize(
    ("placement", "schedule", "num_microbatches", "work_us"),
    [
        (place(Costs.uniform(4, 1, 2, activation_bytes=1), Cluster.uniform(4, 4)), one_f_one_b, 24, 3),
        (interleaved(Costs.uniform(8, 1, 2, activation_bytes=1), Cluster.uniform(4)), interleaved_one_f_one_b, 32, 6),
        (wave(Costs.uniform(8, 1, 1, 1, activation_bytes=2), Cluster.uniform(4)), v_min, 32, 6),
    ],
)
def test_a_schedule_that_repeats_has_its_own_period(
    placement: Placement, schedule, num_microbatches: int, work_us: int
) -> None:
    found = within(Problem(placement, num_microbatches), schedule(placement, num_microbatches))
    assert found is not None
    found.steady.verify()
    assert found.steady.us_per_microbatch == work_us
    assert not any(found.steady.over_bytes())
    check(found.steady.unroll(num_microbatches))


def test_what_transfers_hold_is_left_to_the_search_from_scratch() -> None:
    costs = Costs.uniform(2, 1, 2, activation_bytes=1, boundary_bytes=1)
    placement = place(costs, Cluster.uniform(2, 9, bytes_per_us=1))
    assert within(Problem(placement, 8), one_f_one_b(placement, 8)) is None
