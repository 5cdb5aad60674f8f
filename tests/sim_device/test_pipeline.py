"""Pipelines on simulated devices: the unsplit model's values, no race, and no wait of the host inside a step."""

from __future__ import annotations

import pytest

from rota import Plan
from rota.schedules import FAMILIES, Family
from runtime import test_random_orders
from support.device_orders import family_plans
from support.networks import assert_equal_steps, batch_of, chain, pipeline_steps, serial_step
from support.pool import Pool
from support.sim_device.pool import SimPool

pytestmark = pytest.mark.dist


@pytest.fixture
def sim_pool(pool: Pool) -> SimPool:
    return SimPool(pool, ("losses.py",))


def plans_of(family: Family, num_ranks: int) -> list[Plan]:
    return [*family_plans([family], [num_ranks])][:2]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
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
            if not test_random_orders.trains(plan):
                serial.gradients.clear()
            assert_equal_steps(results, serial)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_random_orders_of_graphs_and_shared_stages(sim_pool: SimPool, num_ranks: int) -> None:
    test_random_orders.run_and_compare(sim_pool, num_ranks, range(12))  # type: ignore[arg-type]
