"""`torch.set_default_device` is the user's: what the hosts send each other stays on the CPU."""

from __future__ import annotations

import pytest
import torch

from rota import Cluster, Costs, Pipeline, place
from rota.schedules import one_f_one_b
from support.networks import batch_of, chain, loss_fn, serial_step
from support.pool import Pool

pytestmark = pytest.mark.dist


def step_under_another_default(rank: int) -> tuple[float, float]:
    del rank
    plan = one_f_one_b(place(Costs.uniform(2), Cluster.uniform(2)), 4)
    stages, batch = chain(2), batch_of(4)
    with torch.device("meta"), Pipeline(stages, plan, loss_fn) as pipeline:
        losses = [pipeline.step(*batch) for _ in range(2)]
        pipeline.clip_grad_norm_(1.0)
        pipeline.evaluate(*batch)
        pipeline.timeline()
    assert losses[0] == losses[1]
    return losses[0], serial_step(chain(2), *batch).loss


def test_a_default_device_of_another_type(pool: Pool) -> None:
    for loss, serial in pool.run(2, step_under_another_default):
        assert abs(loss - serial) < 1e-10
