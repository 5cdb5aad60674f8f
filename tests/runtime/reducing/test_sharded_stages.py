"""Stages in FSDP2: right with the pipeline's many forwards, or refused with a remedy."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rota
from rota import Pipeline, Stages
from support.meshed import LATE_W, Case, assert_trains_as_unsplit, on_each, part_of, plan_of, sharded
from support.networks import Layer, batch_of, loss_fn, refusal
from support.pool import Pool, on_ranks


def sharded_by_layer(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Whole weights are let go after each forward."""
    for layer in module.layers:
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=True)
    return fully_shard(module, mesh=mesh["dp"], reshard_after_forward=True)


def layers_alone_sharded(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The last layer stays whole."""
    fully_shard(module.layers[0], mesh=mesh["dp"])
    return module


class Deep(nn.Module):
    """The gradient of `scale` needs its value."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.scale = nn.LayerNorm(6), nn.Parameter(torch.linspace(1, 2, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale.square()
        for layer in self.layers:
            x = layer(x)
        return torch.tanh(self.norm(x))


def deep(case: Case, _: None = None) -> Stages:
    torch.manual_seed(0)
    return Stages([Deep().double() for _ in range(plan_of(case).num_stages)])


@pytest.mark.sweep
def test_fsdp(pool: Pool) -> None:
    kinds = (sharded, sharded_by_layer, layers_alone_sharded)
    cases = [Case(schedule, 2, 2, wrap) for schedule in ("interleaved_1f1b", LATE_W) for wrap in kinds]
    pool.renew()
    assert_trains_as_unsplit(pool, deep, [*cases, Case("gpipe", 2, 2, sharded_by_layer, recomputed=True)])


def test_fsdp_on_three_ranks_and_one(pool: Pool) -> None:
    """Ranks that shard among three, and a pipeline of one rank."""
    cases = [Case("gpipe", 1, 3, sharded_by_layer), Case("zb_h1", 1, 3, sharded)]
    pool.renew()
    by_process = pool.run(3, on_each, evaluate_between, [(case,) for case in cases])
    x, target = batch_of(9, 1)
    for i, case in enumerate(cases):
        serial, expected = deep(case), []
        optimizer = torch.optim.SGD(serial[0].parameters(), lr=0.5)
        for _ in range(2):
            for factor in (1, 2):
                loss = loss_fn(serial.run(x), target)
                (loss * factor).backward()
                expected.append(loss.item())
            expected.append(loss.item())
            optimizer.step()
        for found in by_process:
            assert found[i] == pytest.approx(expected, rel=1e-10)


def evaluate_between(rank: int, case: Case) -> list[float]:
    """Whole weights that an evaluation gathered must not stay; gradients add up over steps with and without sync."""
    mesh = rota.mesh(pp=case.pp, dp=case.dp)
    stages, found = Stages([case.wrap(deep(case)[0], mesh)]), []
    with Pipeline(stages, plan_of(case, 3), loss_fn, mesh=mesh) as pipeline:
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.5)
        batch = part_of(batch_of(9, 1), pipeline)
        for _ in range(2):
            for factor in (1, 2):
                found.append(pipeline.step(*batch, scale=factor, sync=factor == 2))
            found.append(pipeline.evaluate(*batch))
            optimizer.step()
    return found


@on_ranks(2, renewed=True)
def test_what_cannot_be_right_is_refused(rank: int) -> None:
    """Of two replicas of one rank each, and of a pipeline without replicas."""
    mesh = rota.mesh(pp=1, dp=2)
    in_ddp, around_a_layer = DistributedDataParallel(Deep()), Deep()
    around_a_layer.layers[0] = DistributedDataParallel(around_a_layer.layers[0])
    wrongly_sharded = fully_shard(Deep(), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "x"))["x"])
    told = [
        refusal(Pipeline, Stages([stage]), plan_of(Case("gpipe", 1, 2)), loss_fn, mesh=mesh)
        for stage in (in_ddp, around_a_layer, wrongly_sharded)
    ]
    tied = Stages([nn.Linear(4, 4), nn.Linear(4, 4)])
    tied[1].weight = tied[0].weight
    tied = tied.with_modules(tied.modules)
    fully_shard(tied[rank], mesh=mesh["dp"])
    of_tied = refusal(Pipeline, tied, plan_of(Case("gpipe", 1, 2)), loss_fn, mesh=mesh)
    for text in told[:2]:
        assert text.startswith("stage 0 has DDP in it, which would reduce after the first of several backwards")
    assert "of stage 0 is a DTensor over a mesh of the processes" in told[2]
    assert "use fully_shard(stage, mesh=mesh['dp'])" in told[2]
    assert of_tied.startswith("weight of stage 0 and weight of stage 1 were one weight, of which fully_shard has made")
