"""`rota.add_loss` in stages: counted once per micro-batch, weighed as the main loss is, on any plan."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rota
from rota import Cluster, Costs, Pipeline, PipelineError, Plan, Stages, bidirectional, place
from rota.schedules import NAMED, chimera
from support.networks import WIDTH, loss_fn
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


class Case(NamedTuple):
    stages: Stages
    plan: Plan
    loss: Any = loss_fn
    rows: int = 16
    dp: int = 1
    recompute: str = "none"


def batch_of(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(2, rows, WIDTH, generator=generator, dtype=torch.float64)
    return x, target


def on_each(rank: int, cases: list[Case]) -> list[Any]:
    results = []
    for case in cases:
        stages = copy.deepcopy(case.stages)
        mesh = rota.mesh(pp=case.plan.num_ranks, dp=case.dp)
        with Pipeline(stages, case.plan, case.loss, mesh=mesh, recompute=case.recompute) as pipeline:
            x, target = (tensor[pipeline.replica :: pipeline.num_replicas] for tensor in batch_of(case.rows))
            evaluated = pipeline.evaluate(x, target)
            losses = [pipeline.step(x, target, scale=0.5, sync=False), pipeline.step(x, target, scale=0.5), evaluated]
            results.append((losses, [(s, n, p.grad) for s, m in pipeline.local_stages.items() for n, p in named(m)]))
    return results


def named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [*module.named_parameters()]


def serial(case: Case) -> tuple[float, dict[tuple[int, str], Tensor]]:
    """`loss + aux`, of the whole batch."""
    stages = copy.deepcopy(case.stages)
    x, target = batch_of(case.rows)
    with rota.collect_losses() as added:
        loss = case.loss(stages.run(x), target)
        loss = loss + added.total if isinstance(loss, Tensor) else (loss[0] + added.weighted_total) / loss[1]
        loss.backward()
    gradients = {(s, n): p.grad for s, module in enumerate(stages.modules) for n, p in named(module)}
    return loss.item(), {key: gradient for key, gradient in gradients.items() if gradient is not None}


def assert_exact(pool: Pool, num_ranks: int, cases: dict[str, Case]) -> None:
    by_rank = pool.run(num_ranks, on_each, [*cases.values()])
    for i, (name, case) in enumerate(cases.items()):
        loss, gradients = serial(case)
        found = set()
        for results in by_rank:
            losses, of_rank = results[i]
            assert losses == pytest.approx([loss] * 3, rel=1e-10), name
            for stage, parameter, gradient in of_rank:
                key = stage % len(case.stages), parameter
                found.add(key)
                torch.testing.assert_close(gradient, gradients[key], rtol=1e-10, atol=1e-10)
        assert found == gradients.keys()


def plan_for(num_ranks: int, schedule: str = "1f1b", **costs: Any) -> Plan:
    return NAMED[schedule](place(Costs.uniform(num_ranks, **costs), Cluster.uniform(num_ranks)), N)


CHAINS = chimera(bidirectional(Costs.uniform(2), Cluster.uniform(2)), N)


def test_two_ranks(pool: Pool) -> None:
    stages, counted = expert_stages(2), expert_stages(2, weighed=True)
    several_ranks = NAMED["gpipe"](place(Costs.uniform(2), Cluster.uniform(2), [(0, 1), 1]), N)
    assert_exact(
        pool,
        2,
        {
            "1f1b": Case(stages, plan_for(2)),
            "uneven rows": Case(stages, plan_for(2), rows=14),
            "fewer rows than micro-batches": Case(stages, plan_for(2), rows=3),
            "I and W": Case(stages, plan_for(2, "zb_h1", weight_us=1), rows=14),
            "bidirectional": Case(stages, CHAINS, rows=14),
            "a stage on two ranks": Case(stages, several_ranks),
            "recomputed": Case(stages, plan_for(2), recompute="full"),
            "recomputed by R": Case(stages, plan_for(2, recompute_us=1)),
            "checkpointed": Case(expert_stages(2, checkpointed=True), plan_for(2, "zb_h1", weight_us=1)),
            "counted": Case(counted, plan_for(2), summed_loss, rows=14),
            "counted, fewer rows": Case(counted, plan_for(2), summed_loss, rows=3),
            "counted, I and W": Case(counted, plan_for(2, "zb_h1", weight_us=1), summed_loss, rows=14),
            "counted, bidirectional": Case(counted, CHAINS, summed_loss, rows=14),
            "counted, recomputed": Case(counted, plan_for(2), summed_loss, rows=14, recompute="full"),
        },
    )


def test_replicas(pool: Pool) -> None:
    assert_exact(
        pool,
        4,
        {
            "means": Case(expert_stages(2), plan_for(2), dp=2, rows=28),
            "counted": Case(expert_stages(2, weighed=True), plan_for(2), summed_loss, dp=2, rows=29),
        },
    )


class AuxOnly(nn.Module):
    """Nothing but the added loss reaches its weights, and what it returns has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        rota.add_loss(self.linear(x).square().mean())
        return x.detach()


def test_a_stage_may_be_trained_by_its_added_loss_alone(pool: Pool) -> None:
    stages = expert_stages(3)
    stages = Stages([stages[0], AuxOnly(), stages[2]])
    assert_exact(pool, 3, {"detached": Case(stages, plan_for(3))})


def mixed(rank: int) -> list[str]:
    told = []
    for weighed, loss in ((True, loss_fn), (False, summed_loss)):
        with Pipeline(expert_stages(2, weighed=weighed), plan_for(2), loss) as pipeline:
            with pytest.raises(PipelineError) as error:
                pipeline.step(*batch_of(8))
            told.append(str(error.value))
    return told


def test_counts_must_fit_the_loss(pool: Pool) -> None:
    for with_count, without in pool.run(2, mixed):
        assert "rota.add_loss was given a count, but loss_fn returns a mean; leave the count out" in with_count
        assert "rota.add_loss was given no count, but loss_fn returns (sum, count)" in without
