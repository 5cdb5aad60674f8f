"""After a step that failed on a queued device: no other step, and errors of the device by their own names."""

from __future__ import annotations

import pytest
import torch

from rota import Cluster, Costs, Pipeline, PipelineError, place
from rota.runtime.transport import collective
from rota.schedules import gpipe
from support.networks import batch_of, chain, loss_fn
from support.pool import Pool

pytestmark = pytest.mark.dist


def step_after_a_failure(rank: int) -> list[str]:
    from support.sim_device import SimDevice
    from support.sim_device.pool import pipelines_on_sim

    plan = gpipe(place(Costs.uniform(2), Cluster.uniform(1), [0, 0]), 4)
    said, fails = [], False

    def may_fail(*_: object) -> None:
        if fails:
            raise ValueError("the second step")

    stages = chain(2)
    stages[1].register_forward_pre_hook(may_fail)
    with SimDevice(f"rank {rank}").active(), pipelines_on_sim([]), Pipeline(stages, plan, loss_fn) as pipeline:
        with pytest.raises(PipelineError, match="inputs=None"):
            pipeline.step()  # refused before anything was enqueued
        pipeline.step(*batch_of(4))
        pipeline._is_alone = False  # as if there were others, which would wait for this step's messages
        fails = True
        with pytest.raises(ValueError, match="the second step"):
            pipeline.step(*batch_of(4))
        fails = False
        for call in (pipeline.step, pipeline.evaluate):
            with pytest.raises(PipelineError) as error:
                call(*batch_of(4))
            said.append(str(error.value))
    return said


def test_no_step_follows_one_that_failed(pool: Pool) -> None:
    (said,) = pool.run(1, step_after_a_failure)
    assert all(text.startswith("an earlier call failed on this rank (ValueError: the second step)") for text in said)
    assert all("start all ranks again from a checkpoint" in text for text in said)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("by 2 GiB"), torch.AcceleratorError("an assert", 1)])
def test_an_error_of_the_device_is_not_a_lost_rank(error: RuntimeError) -> None:
    with pytest.raises(type(error)), collective("waiting for others"):
        raise error
