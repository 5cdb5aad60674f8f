"""A pipeline's losses and gradients are the unsplit model's."""

from __future__ import annotations

import pytest

from rota import Cluster, Costs, Plan, place
from rota.schedules import NAMED
from support.networks import assert_equal_steps, batch_of, chain, graph_of_layers, pipeline_steps, serial_step
from support.pool import Pool
from support.sampling import IS_WHOLE

pytestmark = pytest.mark.dist


def plan_for(schedule: str, num_stages: int, num_microbatches: int, edges: list[tuple[int, int]] | None = None) -> Plan:
    placement = place(Costs.uniform(num_stages, 10, 20, edges=edges), Cluster.uniform(num_stages))
    return NAMED[schedule](placement, num_microbatches)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_chain(pool: Pool, schedule: str, num_ranks: int) -> None:
    for num_microbatches in range(1, 10) if IS_WHOLE else (1, 2, 5, 9):
        batches = [batch_of(num_microbatches, seed) for seed in (1, 2)]
        plan = plan_for(schedule, num_ranks, num_microbatches)
        by_rank = pool.run(num_ranks, pipeline_steps, chain(num_ranks), plan, batches)
        for step, batch in enumerate(batches):
            assert_equal_steps([results[step] for results in by_rank], serial_step(chain(num_ranks), *batch))


TWO_BRANCHES_JOIN = [(0, 2), (1, 2)]
SPLIT_AND_JOIN = [(0, 1), (0, 2), (1, 3), (2, 3)]
SKIP_OVER_TWO = [(0, 1), (1, 2), (2, 3), (0, 3)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("num_stages", "edges"),
    [(3, TWO_BRANCHES_JOIN), (4, SPLIT_AND_JOIN), (4, SKIP_OVER_TWO), (3, [(0, 1), (1, 2), (0, 2)])],
)
def test_dag(pool: Pool, schedule: str, num_stages: int, edges: list[tuple[int, int]]) -> None:
    for num_microbatches in (1, 2, 5) if IS_WHOLE else (1, 5):
        batch = batch_of(num_microbatches)
        plan = plan_for(schedule, num_stages, num_microbatches, edges)
        by_rank = pool.run(num_stages, pipeline_steps, graph_of_layers(num_stages, edges), plan, [batch, batch])
        serial = serial_step(graph_of_layers(num_stages, edges), *batch)
        for step in (0, 1):
            assert_equal_steps([results[step] for results in by_rank], serial)
