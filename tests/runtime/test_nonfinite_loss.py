"""A loss that is nan or infinite raises on all ranks, before an optimizer sees its gradients, and says where it is."""

import math
from typing import Any

import torch
from torch import Tensor

import rota
from rota import Cluster, Costs, Pipeline, bidirectional
from rota.schedules import gpipe
from support.networks import (
    ROWS,
    StepResult,
    assert_equal_steps,
    batch_of,
    chain,
    cleared_step,
    loss_fn,
    plan_for,
    refusal,
    serial_step,
)
from support.pool import Pool, on_ranks

N = 4


def batch_with(**losses: float) -> tuple[Tensor, Tensor]:
    """In micro-batch 2, given as m2=…, all targets are that number."""
    inputs, targets = batch_of(N)
    for name, value in losses.items():
        targets.view(N, ROWS, -1)[int(name[1:])] = value
    return inputs, targets


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    """Infinite where the target is."""
    return (output - target).mean()


def several_steps(rank: int) -> tuple[list[Any], StepResult]:
    with Pipeline(chain(3), plan_for(3), loss_fn) as pipeline:
        pipeline.step(*batch_of(N))
        told: list[Any] = [refusal(pipeline.step, *batch_with(m1=math.nan, m3=math.nan))]
        told.append(refusal(pipeline.step, *batch_with(m0=math.inf, m2=math.nan)))
        found = cleared_step(pipeline, *batch_of(N))  # it goes on without that batch
        scaler = torch.amp.GradScaler("cpu")
        told.append(pipeline.step(*batch_with(m1=math.nan), scaler=scaler))
    with Pipeline(chain(3), plan_for(3), loss_fn, allow_nonfinite_loss=True) as pipeline:
        told.append(pipeline.step(*batch_with(m1=math.nan)))
    with Pipeline(chain(3), plan_for(3), mean_loss) as pipeline:
        told.append(pipeline.evaluate(*batch_with(m1=math.nan)))
        told.append(refusal(pipeline.step, *batch_with(m1=math.inf, m2=math.inf)))
    return told, found


def test_all_ranks_refuse_it_and_can_go_on(pool: Pool) -> None:
    by_rank = pool.run(3, several_steps)
    assert_equal_steps([found for _, found in by_rank], serial_step(chain(3), *batch_of(N)))
    for told, _ in by_rank:
        first, second, *returned = told
        assert first.startswith("step 2: the mean loss is nan (nan for micro-batches 1, 3 at stage 2 on rank 2). ")
        assert "reload the last checkpoint or lower the learning rate" in first
        assert "Pipeline(…, allow_nonfinite_loss=True)" in first
        assert second.startswith("step 3: the mean loss is nan (inf for micro-batch 0, nan for micro-batch 2 at ")
        assert all(math.isnan(loss) for loss in returned[:3])
        assert returned[3].startswith("step 1: the mean loss is -inf (-inf for micro-batches 1, 2 at stage 2 on")


@on_ranks(4)
def test_replicas_and_streams_name_the_rank(rank: int) -> None:
    """Only the second replica's batch is bad; then a plan of two streams; then losses that add up to inf."""
    with Pipeline(chain(2), plan_for(2), loss_fn, mesh=rota.mesh(pp=2, dp=2), check_data="never") as pipeline:
        batch = batch_with(m3=math.nan) if pipeline.replica == 1 else batch_of(N)
        told = refusal(pipeline.step, *batch)
    assert "the mean loss is nan (nan for micro-batch 3 at stage 1 on rank 1 of replica 1)." in told
    plan = gpipe(bidirectional(Costs.uniform(4), Cluster.uniform(4)), N)
    with Pipeline(chain(4), plan, loss_fn) as pipeline:
        told = refusal(pipeline.step, *batch_with(m2=math.nan, m3=math.nan))
    assert "nan for micro-batch 3 at stage 7 on rank 0" in told
    assert "nan for micro-batch 2 at stage 3 on rank 3" in told
    with Pipeline(chain(2), plan_for(2), huge_loss, mesh=rota.mesh(pp=2, dp=2), check_data="never") as pipeline:
        told = refusal(pipeline.step, *batch_of(N))
    assert "the mean loss is inf (each micro-batch's is finite, but their sum is not)." in told


def huge_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output * 0).sum() + 1.7e308
