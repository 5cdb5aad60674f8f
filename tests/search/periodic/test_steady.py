"""The best steady state: periods, proofs, and flat starts that hold without a replay."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings

from rota import Cluster, Costs, PlanError, check, place, simulate
from rota.placing import bidirectional
from rota.search.budget import Budget
from rota.search.periodic.steady import find_steady
from support.core_strategies import placed
from support.sampling import some


def v_shape(num_ranks: int, limit: int | None):
    return place(Costs.uniform(num_ranks, 1, 3), Cluster.uniform(num_ranks, limit))


def with_shared(ranks: list[int | str], num_ranks: int, limit: int):
    """A chain in which "all" is a stage on all ranks at once, which holds nothing."""
    kinds = [(1, 0, tuple(range(num_ranks))) if rank == "all" else (3, 1, rank) for rank in ranks]
    backward, held, on = zip(*kinds, strict=True)
    return place(Costs((1,) * len(ranks), backward, activation_bytes=held), Cluster.uniform(num_ranks, limit), on)


def branches(limit: int):
    costs = Costs((1,) * 5, (3, 3, 3, 3, 1), activation_bytes=1)
    return place(costs, Cluster.uniform(4, limit), [0, 1, 2, 3, (0, 1, 2, 3)], [(0, 1), (2, 3), (1, 4), (3, 4)])


SHAPES = {
    "V": (v_shape(4, 4), 4),
    "X": (bidirectional(Costs.uniform(4, 1, 3), Cluster.uniform(4, 4)), 4),
    "K": (branches(6), 6),
    "M": (with_shared(["all", 0, 1, 2, 3], 4, 6), 6),
    "NN": (with_shared(["all", 0, 1, "all", 2, 3], 4, 6), 8),
    "NN-eager": (with_shared(["all", 0, "all", 1, 2, 3], 4, 6), 8),
    "V, tight": (v_shape(4, 3), Fraction(16, 3)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_period_is_proven_least(name: str):
    placement, us_per_microbatch = SHAPES[name]
    found = find_steady(placement, Budget(20, deterministic=True))
    assert found is not None
    assert found.steady.us_per_microbatch == us_per_microbatch
    assert found.is_optimal
    assert found.proven_for
    found.steady.verify()
    check(found.steady.unroll(12))


@pytest.mark.parametrize("name", SHAPES)
def test_inference_is_proven_least(name: str):
    placement = SHAPES[name][0].forward_only()
    found = find_steady(placement, Budget(20, deterministic=True))
    assert found is not None
    assert found.is_optimal
    found.steady.verify()


def test_a_long_step_fills_and_drains_in_one_micro_batch_s_time():
    found = find_steady(v_shape(4, 4), Budget(20, deterministic=True))
    assert found is not None
    assert found.steady.latency_us == 16
    assert simulate(found.steady.unroll(128)).makespan_us == 127 * 4 + 16


def test_flat_starts_that_are_not_true_are_refused():
    found = find_steady(v_shape(4, 4), Budget(20, deterministic=True))
    assert found is not None
    steady = found.steady
    first, *others = steady.starts_us
    with pytest.raises(PlanError, match="overlap"):
        replace(steady, period_us=3).verify()
    with pytest.raises(PlanError, match="arrived"):
        replace(steady, starts_us=((first[0] + 1,), *others)).verify()
    with pytest.raises(PlanError, match="limit"):
        replace(steady, placement=v_shape(4, 3)).verify()


def test_what_grows_for_ever_has_no_steady_state():
    placement = v_shape(2, 8)
    keeps = tuple(replace(task, held_bytes=abs(task.held_bytes)) for task in placement.tasks)
    assert find_steady(replace(placement, tasks=keeps), Budget(1, deterministic=True)) is None


def test_the_same_on_every_run():
    runs = [find_steady(v_shape(4, 3), Budget(20, deterministic=True)) for _ in range(2)]
    assert runs[0] == runs[1]


@settings(max_examples=some(15), deadline=None)
@given(placed())
def test_any_placement_has_a_steady_state_that_keeps_its_word(placement):
    found = find_steady(placement, Budget(0.5, deterministic=True))
    assert found is not None
    assert found.steady.us_per_microbatch >= found.bound_us
    found.steady.verify()
    step = simulate(found.steady.unroll(5))
    flat = found.steady.flat_starts(5)
    first = step.plan.first_node
    starts = step.plan.earliest.starts_us
    for task, row in enumerate(flat):
        assert all(soon <= late for soon, late in zip(starts[first[task] : first[task + 1]], row, strict=True))
