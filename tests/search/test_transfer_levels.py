"""What ranks hold, transfers included: the compiled answer is the simulator's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings

from rota.core.plan import Plan
from rota.core.simulation import simulate
from rota.search.problem import Problem
from rota.search.timing import Tables, peaks, start_times
from rota.search.transfer_levels import Transfers, counting_transfers, peaks_with_transfers
from support import core_strategies as strategies
from support.sampling import some


def in_turn(plan: Plan) -> tuple[Problem, Plan]:
    """The plan with the micro-batches of each task in turn."""
    problem = Problem(replace(plan.placement, static_bytes=(0,) * plan.num_ranks), plan.num_microbatches)
    return problem, problem.to_plan(problem.to_orders(plan))


@given(strategies.plans(most_microbatches=5))
@settings(max_examples=some(300), deadline=None)
def test_peaks_are_the_simulators(given_plan: Plan) -> None:
    unlimited = strategies.with_limits(given_plan, [None] * given_plan.num_ranks)
    problem, plan = in_turn(unlimited)
    held = simulate(plan).peak_memory_bytes
    limited = Problem(strategies.with_limits(plan, held).placement, plan.num_microbatches)
    orders, tables = limited.to_orders(plan), Tables.of(limited)
    starts_us = start_times(tables, orders)
    assert starts_us is not None
    assert tuple(peaks_with_transfers(tables, Transfers.of(limited), orders, starts_us)) == held
    without = np.zeros(plan.num_ranks, np.int64)
    free = Transfers.of(problem)
    assert (peaks_with_transfers(Tables.of(problem), free, orders, starts_us) == without).all()


@given(strategies.plans(most_microbatches=5))
@settings(max_examples=some(200), deadline=None)
def test_counted_peaks_are_part_of_what_is_held(given_plan: Plan) -> None:
    problem, plan = in_turn(given_plan)
    counted = counting_transfers(problem)
    orders = problem.to_orders(plan)
    assert (peaks(counted, orders) >= peaks(problem, orders)).all()
    assert (peaks(counted, orders) <= simulate(plan).peak_memory_bytes).all()
