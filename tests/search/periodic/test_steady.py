"""The best steady state: periods, proofs, and flat starts that hold without a replay."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings

from rota import PlanError, check, simulate
from rota.search.budget import Budget
from rota.search.periodic.steady import find_steady
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
    assert result is not None
    assert result.steady.us_per_microbatch == us_per_microbatch
    assert result.is_optimal
    assert result.proven_for
    result.steady.verify()
    check(result.steady.unroll(12))


@pytest.mark.parametrize("name", SHAPES)
def test_inference_is_proven_least(name: str):
    placement = SHAPES[name][0].forward_only()
    result = find_steady(placement, Budget(20, deterministic=True))
    assert result is not None
    assert result.is_optimal
    result.steady.verify()


def test_a_long_step_fills_and_drains_in_one_micro_batch_s_time():
    result = find_steady(tessel("v", 4, 4), Budget(20, deterministic=True))
    assert result is not None
    assert result.steady.latency_us == 16
    assert simulate(result.steady.unroll(128)).makespan_us == 127 * 4 + 16


def test_flat_starts_that_are_not_true_are_refused():
    result = find_steady(tessel("v", 4, 4), Budget(20, deterministic=True))
    assert result is not None
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
    assert result is not None
    assert result.steady.us_per_microbatch >= result.bound_us
    result.steady.verify()
    step = simulate(result.steady.unroll(5))
    flat = result.steady.flat_starts(5)
    first = step.plan.first_node
    starts = step.plan.earliest.starts_us
    for task, row in enumerate(flat):
        assert all(soon <= late for soon, late in zip(starts[first[task] : first[task + 1]], row, strict=True))
