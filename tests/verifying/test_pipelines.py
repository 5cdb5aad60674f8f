"""verify on the processes of a Pipeline: its plan runs, and the first process holds the unsplit model."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rota
from rota import Pipeline, Verification, bidirectional, place, split, verify
from rota.schedules import NAMED
from support.pool import Pool, on_ranks
from verifying.test_copies import NotCopied
from verifying.test_verify import WIDTH, Gated, sequential, sliding, summed, with_metrics


def gpt_like() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)]
    return nn.Sequential(*layers), torch.randn(8, WIDTH), torch.randn(8, WIDTH)


def trained(rank: int, plan: rota.Plan, mesh: dict[str, int] | None = None) -> tuple[Verification, list[float]]:
    """Verifies between two steps; the losses of the steps around it, and of as many without it."""
    losses: list[float] = []
    found: Verification | None = None
    for verifies in (True, False):
        model, x, target = gpt_like()
        stages = split(model, plan.num_stages)
        with Pipeline(stages, plan, functional.mse_loss, mesh=mesh and rota.mesh(**mesh)) as pipeline:
            optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.1)
            rows = slice(pipeline.replica, None, pipeline.num_replicas)
            for step in range(3):
                if step and verifies:
                    inputs = x[rows] if pipeline.rank == 0 else None  # what a rank does not read need not be there
                    if plan.placement.num_components == 2:
                        inputs = x
                    found = verify(pipeline, inputs, target[rows])
                optimizer.zero_grad()
                losses.append(pipeline.step(x[rows], target[rows]))
                optimizer.step()
    assert found is not None
    return found, losses


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_pipeline_is_exact_and_trains_on_as_without(pool: Pool, schedule: str) -> None:
    costs = rota.Costs.uniform(2, 10, 10, weight_us=10) if schedule == "zb_h1" else rota.Costs.uniform(2, 10, 20)
    plan = NAMED[schedule](place(costs, rota.Cluster.uniform(2)), 4)
    for found, losses in pool.run(2, trained, plan):
        assert found.exact, found.to_text()
        assert len(found.comparisons[0].parameters) == 6
        assert losses[:3] == losses[3:]
        assert "dropout was switched off in both models" in found.notes


def test_replicas_and_a_bidirectional_plan(pool: Pool) -> None:
    plan = NAMED["1f1b"](place(rota.Costs.uniform(2, 10, 20), rota.Cluster.uniform(2)), 2)
    for found, losses in pool.run(4, trained, plan, {"pp": 2, "dp": 2}):
        assert found.exact, found.to_text()
        assert losses[:3] == losses[3:]
    plan = NAMED["chimera"](bidirectional(rota.Costs.uniform(2, 10, 20), rota.Cluster.uniform(2)), 4)
    for found, _ in pool.run(2, trained, plan):
        assert found.exact, found.to_text()


def verified(rank: int, make: Callable[[int], Any], loss_fn: Any) -> Verification:
    stages, x, target = make(rank)
    plan = NAMED["1f1b"](place(rota.Costs.uniform(len(stages), 10, 20), rota.Cluster.uniform(len(stages))), 2)
    with Pipeline(stages, plan, loss_fn) as pipeline:
        return verify(pipeline, x, target)


def wrong_mask(rank: int) -> Any:
    stages, x, target = sliding(6, copied=False)
    model = stages.unsplit
    stages.unsplit = (lambda: model) if rank == 0 else None
    return stages, x, target


def test_what_is_not_exact_is_named_on_all_ranks(pool: Pool) -> None:
    found = pool.run(2, verified, wrong_mask, functional.mse_loss)
    assert not found[0].exact
    reason = "'layers.1' of stage 1 gets a different 'mask' than in the unsplit model"
    assert found[0].reasons[0].startswith(reason), found[0].to_text()
    assert found[0] == found[1]


@on_ranks(4, renewed=True)
def test_sharded_stages_and_ties_that_sharding_cuts(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    def make_model(is_tied: bool) -> nn.Module:
        torch.manual_seed(0)
        first, second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        if is_tied:
            second.weight = first.weight
        return nn.Sequential(first, nn.Tanh(), second)

    mesh = rota.mesh(pp=2, dp=2)
    plan = NAMED["1f1b"](place(rota.Costs.uniform(2, 10, 20), rota.Cluster.uniform(2)), 2)
    for is_tied in (True, False):
        make = partial(make_model, is_tied)
        stages, x = split(make(), 2), torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))
        for stage in plan.placement.stages_on(mesh.get_local_rank("pp")):
            fully_shard(stages[stage], mesh=mesh["dp"])
        if is_tied:
            with pytest.raises(rota.PipelineError, match=r"0\.weight of stage 0 and 2\.weight of stage 1 were one"):
                Pipeline(stages, plan, functional.mse_loss, mesh=mesh)
    stages.unsplit = make
    with Pipeline(stages, plan, functional.mse_loss, mesh=mesh) as pipeline:
        rows = slice(pipeline.replica, None, 2)
        found = verify(pipeline, x[rows], x[rows])
    assert found.exact, found.to_text()
    assert any("own dtype only" in note for note in found.notes)


@on_ranks(2)
def test_an_error_on_the_first_process_reaches_all(rank: int) -> None:
    model, x = sequential()
    plan = NAMED["1f1b"](place(rota.Costs.uniform(2, 10, 20), rota.Cluster.uniform(2)), 2)
    with Pipeline(split(model, 2), plan, functional.mse_loss) as pipeline:
        for unsplit, message in (
            (None, "matching the unsplit model and the stages failed .* set stages.unsplit to it, or to a function"),
            (nn.Linear(3, 3), "unsplit model's step failed on the first process"),
            (nn.Sequential(NotCopied(3, 3)), "this layer is not to be copied"),
        ):
            pipeline.stages.unsplit = unsplit
            with pytest.raises(rota.PipelineError, match=message):
                verify(pipeline, x, torch.zeros(8, 4))
        pipeline.step(x, torch.zeros(8, 4))


def with_uneven_replicas(rank: int, loss_fn: Any) -> tuple[Verification, float, dict[str, float], float]:
    """Replicas of 3 and 5 rows, in 4 micro-batches; also what a step makes of them, and the loss of all rows."""
    torch.manual_seed(0)
    model, x = sequential(*([Gated(with_count=True)] if loss_fn is with_metrics else []))
    target = torch.tensor([0, 1, -100, -100, 2, 3, 0, -100]) if loss_fn is with_metrics else torch.arange(8) % 4
    whole = copy.deepcopy(model)
    plan = NAMED["1f1b"](place(rota.Costs.uniform(2, 10, 20), rota.Cluster.uniform(2)), 4)
    with Pipeline(split(model, 2), plan, loss_fn, mesh=rota.mesh(pp=2, dp=2)) as pipeline:
        rows = slice(0, 3) if pipeline.replica == 0 else slice(3, 8)
        found = verify(pipeline, x[rows], target[rows])
        metrics = pipeline.metrics
        loss = pipeline.step(x[rows], target[rows])
    with rota.collect_losses() as added:
        output = whole(x)
    total, count = summed(output, target)
    of_all = (total + added.weighted_total) / count if loss_fn is with_metrics else total / count
    return found, loss, metrics, of_all.item()


def test_replicas_with_unequal_rows_need_a_count(pool: Pool) -> None:
    for found, loss, metrics, of_all in pool.run(4, with_uneven_replicas, with_metrics):
        assert found.exact, found.to_text()
        assert loss == pytest.approx(of_all)
        assert found.comparisons[1].loss == pytest.approx(of_all)
        assert metrics == {}  # as before the step
    for found, loss, _, of_all in pool.run(4, with_uneven_replicas, functional.cross_entropy):
        assert loss != pytest.approx(of_all)
        assert found.by_microbatches
        assert found.reasons[0].endswith("Let loss_fn return (sum, count)"), found.to_text()
