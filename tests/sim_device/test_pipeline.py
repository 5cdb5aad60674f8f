"""Pipelines on simulated devices: the unsplit model's values, no race, and no wait of the host inside a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rota import Plan
from rota.schedules import Family
from runtime import (
    test_boundaries,
    test_inference,
    test_random_orders,
    test_sequence_chunks,
    test_spmd,
    test_unused_outputs,
)
from runtime.gradients import test_recompute
from runtime.reducing import test_replicas, test_shared_weights
from support.device_orders import OF_ANY_MODEL, family_plans
from support.networks import assert_equal_steps, batch_of, chain, pipeline_steps, serial_step, trains
from support.pool import Pool
from support.sampling import some
from support.sim_device.pool import SimPool

pytestmark = pytest.mark.dist


#: A tied gradient that was changed between two steps of a round may have been zeroed: the host looks.
ZEROED = ("shared_weights.py",)


@pytest.fixture
def sim_pool(pool: Pool) -> SimPool:
    return SimPool(pool, ZEROED)


def plans_of(family: Family, num_ranks: int) -> list[Plan]:
    return [*family_plans([family], [num_ranks])][:2]


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("family", OF_ANY_MODEL, ids=lambda family: family.name)
def test_every_family(sim_pool: SimPool, family: Family, num_ranks: int) -> None:
    for plan in plans_of(family, num_ranks):
        num_stages = plan.num_stages
        batches = [batch_of(plan.num_microbatches, seed) for seed in (1, 2)]
        by_rank = sim_pool.run(num_ranks, pipeline_steps, chain(num_stages), plan, batches)
        for step, batch in enumerate(batches):
            results = [of_rank[step] for of_rank in by_rank]
            for result in results:
                result.gradients = {(stage % num_stages, name): g for (stage, name), g in result.gradients.items()}
            serial = serial_step(chain(num_stages), *batch)
            if not trains(plan):
                serial.gradients.clear()
            assert_equal_steps(results, serial)


def test_processes_that_have_run_tests_of_the_cpu_can_run_these(pool: Pool, sim_pool: SimPool) -> None:
    pool.renew()
    plan = plans_of(OF_ANY_MODEL[0], 2)[0]
    for either in (pool, sim_pool):
        either.run(2, pipeline_steps, chain(plan.num_stages), plan, [batch_of(plan.num_microbatches, 1)])


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.sweep)])
def test_random_orders_of_graphs_and_shared_stages(sim_pool: SimPool, num_ranks: int) -> None:
    test_random_orders.run_and_compare(sim_pool, num_ranks, range(some(12)))  # type: ignore[arg-type]


@pytest.mark.parametrize("case", ["nested", "large"])
def test_values_between_stages(sim_pool: SimPool, case: str) -> None:
    test_boundaries.test_boundary(sim_pool, case)  # type: ignore[arg-type]


def test_values_that_nobody_uses(pool: Pool) -> None:
    """The stages ask which micro-batch they have, and wait for that."""
    sim_pool = SimPool(pool, (*ZEROED, "test_unused_outputs.py"))
    test_unused_outputs.run_and_compare(sim_pool, 2, range(some(16)))


@pytest.mark.parametrize("case", test_shared_weights.TIED)
def test_tied_weights(sim_pool: SimPool, case: str) -> None:
    test_shared_weights.test_tied(sim_pool, case)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", test_shared_weights.STREAMS)
def test_both_directions(sim_pool: SimPool, case: str) -> None:
    test_shared_weights.test_two_streams(sim_pool, case)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "test",
    [
        test_shared_weights.test_frozen_ties_stay_without_gradients,
        test_recompute.test_split_backwards_and_some_stages,
        test_recompute.test_beside_stages_that_the_plan_recomputes,
        test_recompute.test_recomputation_by_the_plan,
        test_replicas.test_odd_parameters,
        test_replicas.test_evaluation_of_replicas,
        test_replicas.test_dropout_differs_between_replicas_and_is_one_on_all_parts,
    ],
    ids=lambda test: test.__name__,
)
def test_as_on_the_cpu(sim_pool: SimPool, test: Callable[[SimPool], None]) -> None:
    test(sim_pool)


@pytest.mark.parametrize(("pp", "dp"), [(1, 2), (2, 2), (3, 1)])
def test_replicas_that_accumulate(sim_pool: SimPool, pp: int, dp: int) -> None:
    test_replicas.test_gradients_add_up_over_steps_with_and_without_sync(sim_pool, pp, dp)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", test_spmd.CASES)
def test_stages_on_several_ranks(sim_pool: SimPool, case: str) -> None:
    test_spmd.test_stages_on_several_ranks(sim_pool, case, False)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["V", "K"])
def test_evaluation(sim_pool: SimPool, name: str) -> None:
    test_inference.test_batch_norm(sim_pool, name, True)  # type: ignore[arg-type]


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.sweep)])
def test_chunks_of_samples(sim_pool: SimPool, recompute: str) -> None:
    test = test_sequence_chunks.test_plans_per_step_of_replicas_that_have_other_chunks
    test(sim_pool, 1, recompute)  # type: ignore[arg-type]
