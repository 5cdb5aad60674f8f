"""`rota.add_loss` in stages: counted once per micro-batch, weighed as the main loss is, on any plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rota
from rota import Cluster, Costs, Pipeline, Stages, bidirectional, place
from rota.schedules import NAMED, chimera
from support.loss_cases import Batch, Case, assert_exact
from support.networks import WIDTH, Stage, loss_fn, plan_for, refusal, rows_of
from support.pool import Pool

pytestmark = pytest.mark.dist

N = 4


class Expert(nn.Module):
    """Adds two losses. `weighed`: with the number of rows as their count."""

    def __init__(self, weighed: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, 1).double()
        self.weighed, self.checkpointed = weighed, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        gates = torch.sigmoid(self.gate(x))
        count = len(x) if self.weighed else None
        rota.add_loss(0.1 * gates.square().mean(), count)
        x = torch.tanh(self.linear(x)) * gates
        rota.add_loss(0.2 * x.abs().mean().reshape(1), count)
        return x


def expert_stages(num_stages: int, **options: Any) -> Stages:
    torch.manual_seed(0)
    return Stages([Expert(**options) for _ in range(num_stages)])


def summed_loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return ((output - target) ** 2).mean(1).sum(), len(output)


def twice(rows: int) -> list[list[Batch]]:
    """A round of two steps with the same batch."""
    return [[rows_of(rows)] * 2]


CHAINS = chimera(bidirectional(Costs.uniform(2), Cluster.uniform(2)), N)


def test_two_ranks(pool: Pool) -> None:
    stages, counted = expert_stages(2), expert_stages(2, weighed=True)
    several_ranks = NAMED["gpipe"](place(Costs.uniform(2), Cluster.uniform(2), [(0, 1), 1]), N)
    assert_exact(
        pool,
        {
            "1f1b": Case(stages, plan_for(2), twice(16)),
            "uneven rows": Case(stages, plan_for(2), twice(14)),
            "fewer rows than micro-batches": Case(stages, plan_for(2), twice(3)),
            "I and W": Case(stages, plan_for(2, "zb_h1", weight_us=1), twice(14)),
            "bidirectional": Case(stages, CHAINS, twice(14)),
            "a stage on two ranks": Case(stages, several_ranks, twice(16)),
            "recomputed": Case(stages, plan_for(2), twice(16), recompute="full"),
            "recomputed by R": Case(stages, plan_for(2, recompute_us=1), twice(16)),
            "checkpointed": Case(expert_stages(2, checkpointed=True), plan_for(2, "zb_h1", weight_us=1), twice(16)),
            "counted": Case(counted, plan_for(2), twice(14), summed_loss),
            "counted, fewer rows": Case(counted, plan_for(2), twice(3), summed_loss),
            "counted, I and W": Case(counted, plan_for(2, "zb_h1", weight_us=1), twice(14), summed_loss),
            "counted, bidirectional": Case(counted, CHAINS, twice(14), summed_loss),
            "counted, recomputed": Case(counted, plan_for(2), twice(14), summed_loss, recompute="full"),
        },
    )


def test_replicas(pool: Pool) -> None:
    assert_exact(
        pool,
        {
            "means": Case(expert_stages(2), plan_for(2), twice(28), dp=2),
            "counted": Case(expert_stages(2, weighed=True), plan_for(2), twice(29), summed_loss, dp=2),
        },
    )


def added_alone(linear: nn.Linear, x: Tensor) -> Tensor:
    """Nothing but the added loss reaches its weights, and what it returns has no gradient."""
    rota.add_loss(linear(x).square().mean())
    return x.detach()


def test_a_stage_may_be_trained_by_its_added_loss_alone(pool: Pool) -> None:
    stages = expert_stages(3)
    stages = Stages([stages[0], Stage(added_alone, 1), stages[2]])
    assert_exact(pool, {"detached": Case(stages, plan_for(3), twice(16))})


def mixed(rank: int) -> list[str]:
    told = []
    for weighed, loss in ((True, loss_fn), (False, summed_loss)):
        with Pipeline(expert_stages(2, weighed=weighed), plan_for(2), loss) as pipeline:
            told.append(refusal(pipeline.step, *twice(8)[0][0]))
    return told


def test_counts_must_fit_the_loss(pool: Pool) -> None:
    for with_count, without in pool.run(2, mixed):
        assert "rota.add_loss was given a count, but loss_fn returns a mean; leave the count out" in with_count
        assert "rota.add_loss was given no count, but loss_fn returns (sum, count)" in without
