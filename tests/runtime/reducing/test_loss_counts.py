"""Losses with counts: the unsplit model's gradient, whatever the counts of micro-batches, steps and replicas are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import rota
from rota import Cluster, Costs, Pipeline, Plan, Stages, bidirectional, interleaved, place
from rota.schedules import NAMED, chimera
from runtime.reducing.test_wrapped_stages import in_ddp, sharded
from support.networks import WIDTH, chain
from support.pool import Pool

pytestmark = pytest.mark.dist

N = 4
Batch = tuple[Tensor, tuple[Tensor, Tensor]]
Gradients = dict[tuple[int, str], Tensor]


def token_loss(output: Tensor, target: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    values, mask = target
    return (((output - values) ** 2).mean(1) * mask).sum(), mask.sum()


def batch_of(rows: int, seed: int) -> Batch:
    """Very different numbers of rows count in each micro-batch, none in the first if there is a row for each."""
    generator = torch.Generator().manual_seed(seed)
    x, target = torch.randn(2, rows, WIDTH, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, generator=generator, dtype=torch.float64) < torch.linspace(0, 1, rows) ** 2
    mask[: max(rows // N, 1)], mask[-1] = rows < N, True  # padding must not count, so let its row count
    return x, (target, mask.double())


def rounds_of(rows: int, *num_steps: int) -> list[list[Batch]]:
    seeds = iter(range(100))
    return [[batch_of(rows + 3 * step, next(seeds)) for step in range(n)] for n in num_steps]


class Case(NamedTuple):
    """`rounds` of steps; `clear`: gradients are cleared after each round. Batches are dealt over `dp` replicas."""

    stages: Stages
    plan: Plan
    rounds: list[list[Batch]]
    dp: int = 1
    clear: bool = True
    wrap: Callable[..., nn.Module] | None = None
    recompute: str = "none"
    scales: tuple[float, ...] = ()


def part_of(batch: Batch, replica: int, num_replicas: int) -> Batch:
    x, (target, mask) = batch
    rows = slice(replica, None, num_replicas)
    return x[rows], (target[rows], mask[rows])


def scale_of(case: Case, step: int, num_steps: int) -> float:
    return case.scales[step] if case.scales else 1 / num_steps


def steps_on(rank: int, case: Case) -> list[tuple[list[float], Gradients]]:
    stages, mesh = copy.deepcopy(case.stages), rota.mesh(pp=case.plan.num_ranks, dp=case.dp)
    if case.wrap is not None:
        mine = case.plan.placement.stages_on(mesh.get_local_rank("pp"))
        stages = Stages([case.wrap(m, mesh) if s in mine else m for s, m in enumerate(stages.modules)], stages.edges)
    results = []
    with Pipeline(stages, case.plan, token_loss, mesh=mesh, recompute=case.recompute) as pipeline:
        for batches in case.rounds:
            losses = []
            for i, batch in enumerate(batches):
                x, target = part_of(batch, pipeline.replica, pipeline.num_replicas)
                scale = scale_of(case, i, len(batches))
                losses.append(pipeline.step(x, target, scale=scale, sync=i == len(batches) - 1))
            results.append((losses, gradients_of(pipeline)))
            for parameter in pipeline.parameters() if case.clear else ():
                parameter.grad = None
    return results


def gradients_of(pipeline: Pipeline) -> Gradients:
    found = {}
    for stage, module in pipeline.local_stages.items():
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                grad: Any = parameter.grad
                found[stage, name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
    return found


def serial(case: Case) -> list[tuple[list[float], Gradients]]:
    """Each round by the unsplit model: its sums over the mean count of its steps."""
    stages, results = copy.deepcopy(case.stages), []
    for batches in case.rounds:
        made = [token_loss(stages.run(x), target) for x, target in batches]
        mean_count = sum(count for _, count in made) / len(made)
        sum((total * scale_of(case, i, len(made)) for i, (total, _) in enumerate(made)), torch.tensor(0.0)).div(
            mean_count
        ).backward()
        found = {
            (s, name): p.grad.clone()
            for s, module in enumerate(stages.modules)
            for name, p in module.named_parameters()
            if p.grad is not None
        }
        results.append(([(total / count).item() for total, count in made], found))
        for module in stages.modules if case.clear else ():
            module.zero_grad()
    return results


def on_each(rank: int, cases: list[Case]) -> list[Any]:
    return [steps_on(rank, case) for case in cases]


def assert_exact(pool: Pool, cases: dict[str, Case]) -> None:
    num_ranks = next(iter(cases.values())).plan.num_ranks * next(iter(cases.values())).dp
    by_rank = pool.run(num_ranks, on_each, [*cases.values()])
    for i, (name, case) in enumerate(cases.items()):
        for step, (losses, gradients) in enumerate(serial(case)):
            found = set()
            for results in by_rank:
                torch.testing.assert_close(results[i][step][0], losses, rtol=1e-10, atol=1e-10, msg=name)
                for (stage, parameter), gradient in results[i][step][1].items():
                    key = stage % len(case.stages), parameter
                    found.add(key)
                    torch.testing.assert_close(gradient, gradients[key], rtol=1e-10, atol=1e-10)
            assert found == gradients.keys(), name


def plan_for(num_ranks: int, schedule: str = "1f1b", **costs: Any) -> Plan:
    return NAMED[schedule](place(Costs.uniform(num_ranks, **costs), Cluster.uniform(num_ranks)), N)


def tied(num_stages: int) -> Stages:
    stages = chain(num_stages)
    stages[num_stages - 1].linear.weight = stages[0].linear.weight
    return stages


def frozen_first() -> Stages:
    stages = chain(2)
    stages[0].requires_grad_(False)
    return stages


def test_two_ranks(pool: Pool) -> None:
    two_chains = NAMED["interleaved_1f1b"](interleaved(Costs.uniform(4), Cluster.uniform(2)), N)
    chains = chimera(bidirectional(Costs.uniform(2), Cluster.uniform(2)), N)
    assert_exact(
        pool,
        {
            "1f1b": Case(chain(2), plan_for(2), rounds_of(16, 1, 1)),
            "gpipe, uneven rows": Case(chain(2), plan_for(2, "gpipe"), rounds_of(14, 1, 1)),
            "accumulated": Case(chain(2), plan_for(2), rounds_of(14, 3, 1, 2)),
            "earlier gradients stay": Case(chain(2), plan_for(2), rounds_of(14, 1, 3, 2), clear=False),
            "other scales": Case(chain(2), plan_for(2), rounds_of(14, 3, 3), clear=False, scales=(0.1, 2.0, 0.5)),
            "I and W": Case(chain(2), plan_for(2, "zb_h1", weight_us=1), rounds_of(14, 2, 1)),
            "interleaved, tied": Case(tied(4), two_chains, rounds_of(14, 2, 2), clear=False),
            "tied": Case(tied(2), plan_for(2), rounds_of(14, 2, 1, 2), clear=False),
            "bidirectional": Case(chain(2), chains, rounds_of(14, 1, 2), clear=False),
            "recomputed": Case(chain(2), plan_for(2), rounds_of(14, 2), recompute="full"),
            "recomputed by R": Case(chain(2), plan_for(2, recompute_us=1), rounds_of(14, 2)),
            "first stage frozen": Case(frozen_first(), plan_for(2), rounds_of(14, 2, 2)),
            "fewer rows than micro-batches": Case(chain(2), plan_for(2), [[batch_of(3, 1)], [batch_of(2, 2)]]),
        },
    )


def test_unequal_counts_on_replicas(pool: Pool) -> None:
    rounds = rounds_of(29, 1, 2)
    assert_exact(
        pool,
        {
            "1f1b": Case(chain(2), plan_for(2), rounds, dp=2),
            "I and W, not cleared": Case(chain(2), plan_for(2, "zb_h1", weight_us=1), rounds, dp=2, clear=False),
            "tied": Case(tied(2), plan_for(2), rounds, dp=2, clear=False),
            "bidirectional": Case(
                chain(2), chimera(bidirectional(Costs.uniform(2), Cluster.uniform(2)), N), rounds, dp=2
            ),
        },
    )


def test_ddp_and_fsdp(pool: Pool) -> None:
    rounds = rounds_of(29, 1, 2)
    pool.renew()
    assert_exact(
        pool,
        {
            "DDP": Case(chain(2), plan_for(2), rounds, dp=2, wrap=in_ddp, clear=False),
            "FSDP2": Case(chain(2), plan_for(2), rounds, dp=2, wrap=sharded),
            "FSDP2, I and W, not cleared": Case(
                chain(2), plan_for(2, "zb_h1", weight_us=1), rounds, dp=2, wrap=sharded, clear=False
            ),
        },
    )
