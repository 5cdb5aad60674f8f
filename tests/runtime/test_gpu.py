"""Where an accelerator is at hand: a pipeline of one process trains on it as the unsplit model does on the CPU."""

from __future__ import annotations

import pytest
import torch

import rota
from rota import Cluster, Costs, Pipeline, place
from rota.schedules import gpipe
from support.networks import StepResult, assert_equal_steps, batch_of, chain, gradients_of, loss_fn, serial_step
from support.pool import Pool

pytestmark = pytest.mark.dist


def step_on_a_gpu(rank: int) -> StepResult:
    stages = chain(2).to(rota.local_device())
    with Pipeline(stages, gpipe(place(Costs.uniform(2), Cluster.uniform(1), [rank] * 2), 2), loss_fn) as pipeline:
        assert pipeline.device.type != "cpu"
        loss = pipeline.step(*batch_of(2))
        gradients = gradients_of(stages, pipeline.local_stages)
        return StepResult(loss, {key: gradient.cpu() for key, gradient in gradients.items()})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a GPU, and there is none here")
def test_two_stages_of_one_process(pool: Pool) -> None:
    assert_equal_steps(pool.run(1, step_on_a_gpu), serial_step(chain(2), *batch_of(2)))
