"""The ranks that are left do a step as all of them would have: the same loss, gradients and dropped activations."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import rota
from rota import Cluster, Costs, Pipeline, PipelineError, Plan, place
from rota.backups import Place, plan_backup
from rota.runtime.environment import backups_environment
from rota.runtime.microbatches import to_microbatches
from rota.schedules import NAMED
from support.networks import loss_fn
from support.pool import Pool

pytestmark = pytest.mark.dist


def plan_of(schedule: str) -> Plan:
    costs = Costs.uniform(2, 100, 200) if schedule == "1f1b" else Costs.uniform(2, 100, 100, weight_us=100)
    return NAMED[schedule](place(costs, Cluster.uniform(2)), 4)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.tanh(self.linear(x)), 0.2, self.training)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(*(Layer() for _ in range(4))).double()
    layers[3].linear.weight = layers[0].linear.weight  # tied over stages
    return layers


Found = tuple[list[float], dict[str, Tensor]]


def steps(rank: int, plan: Plan, num_rows: int) -> Found:
    """Two losses, the second after a step of AdamW, and the gradients of the second step."""
    mesh = rota.mesh(pp=plan.num_ranks, dp=torch.distributed.get_world_size() // plan.num_ranks)
    losses = []
    with Pipeline(rota.split(model(), 2), plan, loss_fn, mesh=mesh) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.01)
        for seed in range(2):
            optimizer.zero_grad()
            torch.manual_seed(seed)
            x, y = torch.randn(2, num_rows, 8, dtype=torch.float64)
            mine = slice(pipeline.replica, None, pipeline.num_replicas)
            losses.append(pipeline.step(x[mine], y[mine]))
            if not seed:
                optimizer.step()
        named = pipeline.named_parameters()
        return losses, {name: p.grad.clone() for name, p in named if p.grad is not None}


@pytest.mark.parametrize(
    ("schedule", "num_replicas", "lost", "num_rows"),
    [
        ("1f1b", 2, [Place(0, 0)], 24),
        ("1f1b", 2, [Place(1, 1)], 5),  # fewer rows than micro-batches
        ("zb_h1", 3, [Place(0, 0)], 24),  # whose micro-batches two peers share
        ("1f1b", 3, [Place(0, 0), Place(2, 1)], 25),  # replicas get different numbers of rows, but count equally
    ],
)
def test_a_step_is_what_it_was(pool: Pool, schedule: str, num_replicas: int, lost: list[Place], num_rows: int) -> None:
    plan = plan_of(schedule)
    expected = pool.run(2 * num_replicas, steps, plan, num_rows)
    backup = plan_backup(plan, num_replicas, lost)
    found = pool.run(backup.num_ranks, steps, backup, num_rows)
    gradients = {name: gradient for _, of_rank in expected for name, gradient in of_rank.items()}
    seen = set()
    for losses, of_rank in found:
        assert losses == pytest.approx(expected[0][0], abs=1e-12, rel=0)
        for name, gradient in of_rank.items():
            torch.testing.assert_close(gradient, gradients[name], atol=1e-12, rtol=0)
        seen |= of_rank.keys()
    assert seen == gradients.keys()


def test_rows_go_to_the_replica_that_would_have_them() -> None:
    backup = plan_backup(plan_of("1f1b"), 3, [Place(0, 0)])
    origins = [*map(backup.origin, range(12))]
    assert sorted(origins) == [(replica, own) for replica in range(3) for own in range(4)]
    for num_rows in (5, 12, 29):
        batch = {"x": torch.arange(num_rows), "same": torch.ones(1), "n": 3}
        found = to_microbatches("inputs", batch, 12, origins=origins)
        for replica in range(3):
            of_replica = {**batch, "x": batch["x"][replica::3]}
            alone = to_microbatches("inputs", of_replica, 4)
            for own, expected in enumerate(alone.values):
                m = origins.index((replica, own))
                assert (m in found.padding) == (own in alone.padding)
                if m in found.padding:
                    continue
                value = found.values[m]
                assert torch.equal(value["x"], expected["x"])
                assert value["same"] is batch["same"]
    listed = to_microbatches("inputs", [torch.tensor([i]) for i in range(12)], 12, origins=origins)
    assert [int(value) for value in listed.values] == [own * 3 + replica for replica, own in origins]
    with pytest.raises(PipelineError, match="2 rows for 3 replicas"):
        to_microbatches("inputs", torch.ones(2, 2), 12, origins=origins)


# --- what no backup plan can run, refused while all ranks are there ---------------------------------------------------


class Averaging(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))  # type: ignore[assignment]


def refusal(rank: int, what: str) -> str:
    """Of the first step or what comes before it, in a run with backup plans."""
    plan = plan_of("1f1b")
    mesh = rota.mesh(pp=2, dp=torch.distributed.get_world_size() // 2)
    x = torch.randn(12, 8, dtype=torch.float64)
    layers = nn.Sequential(*((Averaging if what == "statistics" else Layer)() for _ in range(4))).double()
    stages = rota.split(layers, 2)
    if what == "sharded":
        fully_shard(stages[mesh.get_local_rank("pp")], mesh=mesh["dp"])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(PipelineError) as error:  # noqa: PT012
        for name, value in backups_environment().items():
            patch.setenv(name, value)
        with Pipeline(stages, plan, loss_fn, mesh=mesh) as pipeline:
            if what == "evaluation":
                pipeline.evaluate(x, x, plan=replace(plan))
            pipeline.step(x, x, plan=replace(plan) if what == "plan" else None, sizes=[(3,)] * 4 * (what == "sizes"))
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("statistics", "changes its buffer .*: use a layer without running statistics, put it in eval.., or leave out"),
        ("plan", "a plan of its own for a step, .* leave it out, or leave out --backups"),
        ("sizes", "a plan of its own for a step, or sizes"),
        ("evaluation", "a plan of its own for a step"),
        pytest.param("sharded", "stage [01] is sharded by fully_shard", marks=pytest.mark.sweep),
    ],
)
def test_what_a_backup_plan_could_not_run_is_refused_at_once(pool: Pool, what: str, told: str) -> None:
    if what == "sharded":
        pool.renew()
    for found in pool.run(4 if what == "sharded" else 2, refusal, what):
        assert re.search(told, found)
    if what == "sharded":
        pool.renew()
