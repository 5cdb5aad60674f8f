"""The best steady state: periods, proofs, and flat starts that hold without a replay."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from rota import Cluster, Costs, PlanError, check, place, simulate
from rota.search import Frontier, find_frontier
from rota.search.budget import Budget
from rota.search.periodic.loop import Loop
from rota.search.periodic.modulo import Interval, Period
from rota.search.periodic.offsets import anneal_offsets
from rota.search.periodic.steady import Steady, find_steady
from support.core_strategies import placed
from support.sampling import some
from support.tessel_shapes import tessel

SHAPES = {
    "V": (tessel("v", 4, 4), 4),
    "X": (tessel("x", 4, 4), 4),
    "K": (tessel("k", 4, 6), 6),
    "M": (tessel("m", 4, 6), 6),
    "NN": (tessel("nn", 4, 6), 8),
    "NN-eager": (tessel("nn-eager", 4, 6), 8),
    "V, tight": (tessel("v", 4, 3), Fraction(16, 3)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_period_is_proven_least(name: str):
    placement, us_per_microbatch = SHAPES[name]
    result = find_steady(placement, Budget(20, deterministic=True))
    assert result.steady.us_per_microbatch == us_per_microbatch
    assert result.is_optimal
    assert result.proven_for
    result.steady.verify()
    check(result.steady.unroll(12))


@pytest.mark.parametrize("name", SHAPES)
def test_inference_is_proven_least(name: str):
    placement = SHAPES[name][0].forward_only()
    result = find_steady(placement, Budget(20, deterministic=True))
    assert result.is_optimal
    result.steady.verify()


def test_a_long_step_fills_and_drains_in_one_micro_batch_s_time():
    result = find_steady(tessel("v", 4, 4), Budget(20, deterministic=True))
    assert result.steady.latency_us == 16
    assert simulate(result.steady.unroll(128)).makespan_us == 127 * 4 + 16


def test_flat_starts_that_are_not_true_are_refused():
    result = find_steady(tessel("v", 4, 4), Budget(20, deterministic=True))
    steady = result.steady
    first, *others = steady.starts_us
    with pytest.raises(PlanError, match="overlap"):
        replace(steady, period_us=3).verify()
    with pytest.raises(PlanError, match="arrived"):
        replace(steady, starts_us=((first[0] + 1,), *others)).verify()
    with pytest.raises(PlanError, match="limit"):
        replace(steady, placement=tessel("v", 4, 3)).verify()


@settings(max_examples=some(15))
@given(placed())
def test_any_placement_has_a_steady_state_that_keeps_its_word(placement):
    result = find_steady(placement, Budget(0.5, deterministic=True))
    assert result.steady.us_per_microbatch >= result.bound_us
    result.steady.verify()
    step = simulate(result.steady.unroll(5))
    flat = result.steady.flat_starts(5)
    first = step.plan.first_node
    starts = step.plan.earliest.starts_us
    for task, row in enumerate(flat):
        assert all(soon <= late for soon, late in zip(starts[first[task] : first[task + 1]], row, strict=True))


# --- the model of one period, annealed offsets and retiming -----------------------------------------------------------


def v_loop(num_ranks: int, limit: int | None) -> Loop:
    return Loop(place(Costs.uniform(num_ranks, 1, 3), Cluster.uniform(num_ranks, limit)))


@pytest.mark.parametrize(("limit", "period"), [(4, 4), (3, 8), (2, 8), (1, 16)])
def test_one_micro_batch_a_period_is_proven(limit: int, period: int):
    loop = v_loop(4, limit)
    below = Period(Interval(loop, 1, period - 1)).solve(Budget(1))
    rhythm = Period(Interval(loop, 1, period)).solve(Budget(1)).rhythm
    assert below.rhythm is None
    assert below.is_proven
    assert rhythm.period_us == period


def test_three_micro_batches_a_period_use_memory_that_one_cannot():
    rhythm = Period(Interval(v_loop(4, 3), 3, 16)).solve(Budget(5)).rhythm
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


# --- memory against period: less memory is slower, and every point keeps its limit, with what its transfers hold ------


def require_true(curve: Frontier, *nums_microbatches: int) -> None:
    """All points are within their limits, at flat starts and unrolled, and each is faster than those before."""
    assert all(a.us_per_microbatch > b.us_per_microbatch for a, b in pairwise(curve.points))
    for point in curve.points:
        assert point.peak_bytes <= point.limit_bytes
        assert point.bound_us <= point.us_per_microbatch
        point.result.steady.verify()
        for num_microbatches in nums_microbatches:
            plan = point.result.steady.unroll(num_microbatches)
            assert set(plan.placement.cluster.limit_bytes) == {point.limit_bytes}
            check(plan)


def test_more_memory_is_faster_until_the_work_is_met() -> None:
    placement = place(Costs.uniform(4, 1, 3), Cluster.uniform(4))
    curve = find_frontier(placement, time_limit_s=30, microbatches_per_period=1, deterministic=True)
    assert [(point.limit_bytes, point.us_per_microbatch) for point in curve.points] == [(1, 16), (2, 8), (4, 4)]
    require_true(curve, 8)
    several = find_frontier(placement, time_limit_s=60, deterministic=True).points
    assert [str(point.us_per_microbatch) for point in several] == ["16", "8", "16/3", "4"]


def test_limits_hold_with_transfers() -> None:
    placement = place(Costs.uniform(4, 10, 20, activation_bytes=10, boundary_bytes=8), Cluster.uniform(4, latency_us=5))
    curve = find_frontier(placement, time_limit_s=1, deterministic=True)
    assert len(curve.points) > 2
    require_true(curve, 1, 2, 5, 16)


@settings(max_examples=some(10))
@given(
    st.integers(2, 4),
    st.tuples(st.integers(1, 9), st.integers(0, 12)),
    st.tuples(st.integers(0, 9), st.sampled_from([None, 4])),
    st.integers(0, 9),
    st.integers(1, 24),
)
def test_any_chain(
    num_ranks: int, sizes: tuple[int, int], times: tuple[int, int | None], latency_us: int, num_microbatches: int
) -> None:
    costs = Costs.uniform(num_ranks, times[0], 7, times[1], activation_bytes=sizes[0], boundary_bytes=sizes[1])
    placement = place(costs, Cluster.uniform(num_ranks, latency_us=latency_us, bytes_per_us=3))
    require_true(find_frontier(placement, time_limit_s=0.3, deterministic=True), num_microbatches)
