"""Meshes: which process is where, placements with replicas, and meshes that do not fit."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import rota
from rota import Cluster, Costs, Pipeline, PipelineError, Stages, place, spmd
from rota.schedules import gpipe
from support.meshed import on_each, part_of
from support.networks import batch_of, chain, loss_fn, refusal
from support.parallel_modules import Normed, ParallelLayer, assert_equal_normed, normed_step
from support.pool import Pool, on_ranks


def on_both_ranks(group: spmd.Group) -> Stages:
    return Stages([ParallelLayer(0, group), ParallelLayer(1, None)])


def step_with_replicas(rank: int) -> list[Normed]:
    """Of a stage on both ranks of the plan."""
    mesh = rota.mesh(pp=2, dp=2)
    plan = gpipe(place(Costs.uniform(2), Cluster.uniform(2), [(0, 1), 1]), 4)
    with Pipeline(on_both_ranks(spmd.group([0, 1], mesh)), plan, loss_fn, mesh=mesh) as pipeline:
        return [normed_step(pipeline, *part_of(batch_of(8), pipeline))]


def test_shared_weights_of_replicas(pool: Pool) -> None:
    by_process = pool.run(4, step_with_replicas)
    assert_equal_normed(by_process, on_both_ranks(None), [batch_of(8)], lambda process, _: process % 2)


def loss_and_place(rank: int, stages: Stages, shape: tuple[int, ...], dims: tuple[str, ...]) -> tuple[float, int, int]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=dims)
    num_ranks = mesh["pp"].size() if "pp" in dims else 1
    plan = gpipe(place(Costs.uniform(2), Cluster.uniform(num_ranks), [0, num_ranks - 1]), 4)
    with Pipeline(copy.deepcopy(stages), plan, loss_fn, mesh=mesh) as pipeline:
        return pipeline.step(*part_of(batch_of(16), pipeline)), pipeline.rank, pipeline.replica


def test_dims_may_be_few_and_in_any_order(pool: Pool) -> None:
    cases = [((2, 2), ("dp", "pp")), ((2, 2), ("pp", "dp")), ((4,), ("dp",)), ((2, 1, 2), ("tp", "dp", "pp"))]
    by_process = pool.run(4, on_each, loss_and_place, [(chain(2), *case) for case in cases])
    x, target = batch_of(16)
    expected = loss_fn(chain(2).run(x), target).item()
    places = [[(found[i][1], found[i][2]) for found in by_process] for i in range(len(cases))]
    assert places[0] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert places[1] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert places[2] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert places[3] == [(0, 0), (1, 0), (0, 0), (1, 0)]
    for found in by_process:
        assert [loss for loss, *_ in found] == pytest.approx([expected] * len(cases), rel=1e-10)


@on_ranks(4)
def test_refusals(rank: int) -> None:
    plan = gpipe(place(Costs.uniform(2), Cluster.uniform(2)), 4)
    told = []
    remedy = r"give Pipeline mesh=rota.mesh\(pp=2, dp=2\) for 2 replicas, or start 2, or plan for 4"
    with pytest.raises(PipelineError, match=remedy):
        Pipeline(chain(2), plan, loss_fn)
    for make in (
        lambda: rota.mesh(pp=3),
        lambda: rota.mesh(pp=4),
        lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp")),
        lambda: init_device_mesh("cpu", (2, 2)),
    ):
        told.append(refusal(lambda make=make: Pipeline(chain(2), plan, loss_fn, mesh=make())))
    with Pipeline(chain(2), plan, loss_fn, mesh=rota.mesh(pp=2, dp=2), check_data="never") as pipeline:
        told.append(refusal(pipeline.step, *batch_of(4), sync=rank != 2))
        with pytest.raises(PipelineError, match="scale is nan; give a number above 0"):
            pipeline.step(*batch_of(4), scale=float("nan"))
        # Layouts were not exchanged by the step that was refused, and are by this one.
        loss = pipeline.step(*batch_of(4))
        assert loss == pytest.approx(pipeline.evaluate(*batch_of(4)), rel=1e-10)
    assert "a mesh of pp=3, dp=1, tp=1 is for 3 processes, but 4 were started; start 3, such as with" in told[0]
    assert "the plan is for 2 ranks, but the mesh has 4 along 'pp'; make it with pp=2, or plan for 4" in told[1]
    assert "the mesh has the dims 'pp', 'cp'; name them among 'dp', 'pp' and 'tp'" in told[2]
    assert "the mesh has the dims without names" in told[3]
    assert "rank 0 of replica 0, rank 1 of replica 0, rank 1 of replica 1 call step(); " in told[4]
    assert "rank 0 of replica 1 calls step(sync=False); make the same calls in the same order" in told[4]


@pytest.mark.parametrize(("timeout_s", "least_s"), [(None, 1800), (7200, 72000), (float("inf"), 10**8)])
@on_ranks(2)
def test_pytorchs_own_limit_is_never_the_shorter_one(rank: int, timeout_s: float | None, least_s: float) -> None:
    plan = gpipe(place(Costs.uniform(2), Cluster.uniform(2)), 2)
    with Pipeline(chain(2), plan, loss_fn, timeout_s=timeout_s) as pipeline:
        backend = pipeline.processes.pipeline._get_backend(torch.device("cpu"))
        # PyTorch 2.15 subtracts the time that it took to make the group.
        assert backend.options._timeout.total_seconds() >= least_s - 60
