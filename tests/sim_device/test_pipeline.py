"""Pipelines on simulated devices: the unsplit model's values, no race, and no wait of the host inside a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rota import Cluster, Costs, Pipeline, Plan, Stages, place
from rota.schedules import NAMED
from support.networks import StepResult, assert_equal_steps, batch_of, chain, gradients_of, loss_fn, serial_step
from support.pool import Pool

pytestmark = pytest.mark.dist


def steps_on_sim(
    rank: int, stages: Stages, plan: Plan, batches: list[Any], options: dict[str, Any] | None = None
) -> tuple[list[StepResult], list[str]]:
    """As `pipeline_steps`, on a simulated device; and where the host has waited in a step, but for the first one."""
    from support.sim_device import SimDevice
    from support.sim_device.runtime_device import syncs_inside_steps

    device = SimDevice(f"rank {rank}")
    results, syncs = [], []
    with device.active():
        for stage in plan.placement.stages_on(rank):
            stages[stage].to("sim")
        with Pipeline(stages, plan, loss_fn, **(options or {})) as pipeline:
            for step, batch in enumerate(batches):
                pipeline_zero_grad(pipeline)
                inputs, targets = (tensor.to("sim") for tensor in batch)
                syncs_inside_steps()
                loss = pipeline.step(inputs, targets)
                syncs += syncs_inside_steps() if step else []
                results.append(StepResult(loss, gradients_of(stages, pipeline.local_stages)))
        device.check()
        for result in results:
            result.gradients = {key: gradient.cpu() for key, gradient in result.gradients.items()}
    return results, syncs


def pipeline_zero_grad(pipeline: Pipeline) -> None:
    for parameter in pipeline.parameters():
        parameter.grad = None


def plan_for(schedule: str, num_stages: int, num_microbatches: int) -> Plan:
    return NAMED[schedule](place(Costs.uniform(num_stages, 10, 20), Cluster.uniform(num_stages)), num_microbatches)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_chain(pool: Pool, schedule: str) -> None:
    batches = [batch_of(4, seed) for seed in (1, 2)]
    plan = plan_for(schedule, 2, 4)
    by_rank = pool.run(2, steps_on_sim, chain(2), plan, batches)
    for step, batch in enumerate(batches):
        assert_equal_steps([results[step] for results, _ in by_rank], serial_step(chain(2), *batch))
    assert [syncs for _, syncs in by_rank] == [[], []]
