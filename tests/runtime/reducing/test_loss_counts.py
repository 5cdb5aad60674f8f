"""Losses with counts: the unsplit model's gradient, whatever the counts of micro-batches, steps and replicas are."""

from functools import partial

import torch
from torch import Tensor

from rota import Cluster, Costs, Stages, bidirectional, interleaved
from rota.schedules import NAMED, chimera
from support.loss_cases import Batch, Case as AnyCase, assert_exact
from support.meshed import sharded
from support.networks import chain, plan_for, rows_of
from support.pool import Pool

N = 4


def token_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The last column of the target says which rows count."""
    values, mask = target[:, :-1], target[:, -1]
    return (((output - values) ** 2).mean(1) * mask).sum(), mask.sum()


def batch_of(rows: int, seed: int) -> Batch:
    """Very different numbers of rows count in each micro-batch, none in the first if there is a row for each."""
    x, target = rows_of(rows, seed)
    mask = torch.rand(rows, generator=torch.Generator().manual_seed(seed)) < torch.linspace(0, 1, rows) ** 2
    mask[: max(rows // N, 1)], mask[-1] = rows < N, True  # padding must not count, so let its row count
    return x, torch.cat([target, mask.double()[:, None]], 1)


def rounds_of(rows: int, *num_steps: int) -> list[list[Batch]]:
    seeds = iter(range(100))
    return [[batch_of(rows + 3 * step, next(seeds)) for step in range(n)] for n in num_steps]


Case = partial(AnyCase, loss_fn=token_loss)


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
            "earlier gradients stay": Case(chain(2), plan_for(2), rounds_of(14, 1, 3, 2), clear=False),
            "other scales": Case(chain(2), plan_for(2), rounds_of(14, 3, 3), clear=False, scales=(0.1, 2.0, 0.5)),
            "I and W": Case(chain(2), plan_for(2, "zb_h1", weight_us=1), rounds_of(14, 2, 1)),
            "interleaved, tied": Case(tied(4), two_chains, rounds_of(14, 2, 2), clear=False),
            "bidirectional": Case(chain(2), chains, rounds_of(14, 1, 2), clear=False),
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


def test_fsdp(pool: Pool) -> None:
    rounds = rounds_of(29, 1, 2)
    pool.renew()
    assert_exact(
        pool,
        {
            "FSDP2": Case(chain(2), plan_for(2), rounds, dp=2, wrap=sharded),
            "FSDP2, I and W, not cleared": Case(
                chain(2), plan_for(2, "zb_h1", weight_us=1), rounds, dp=2, wrap=sharded, clear=False
            ),
        },
    )
