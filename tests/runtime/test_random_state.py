"""Dropout depends on step, stage and micro-batch alone, and all ranks' random states stay in step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rota import Cluster, Costs, Pipeline, Plan, Stages, place
from rota.schedules import NAMED
from support.networks import batch_of, loss_fn
from support.pool import Pool

pytestmark = pytest.mark.dist


def losses_and_next_numbers(rank: int, plan: Plan) -> tuple[list[float], list[float]]:
    """Two steps with dropout on the first stage only, and what each rank draws after each."""
    del rank
    torch.manual_seed(5)
    stages = Stages([nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).double(), nn.Linear(6, 6).double()])
    losses, numbers = [], []
    with Pipeline(stages, plan, loss_fn) as pipeline:
        for _ in range(2):
            losses.append(pipeline.step(*batch_of(4)))
            numbers.append(float(torch.rand(())))
    return losses, numbers


def test_dropout(pool: Pool) -> None:
    placement = place(Costs.uniform(2), Cluster.uniform(2))
    swapped = NAMED["gpipe"](placement, 4)
    order = [tuple(sorted(o, key=lambda op: (op.kind == "B", -op.microbatch))) for o in swapped.orders]
    plans = [NAMED["1f1b"](placement, 4), swapped, Plan(placement, 4, tuple(order))]
    results = [pool.run(2, losses_and_next_numbers, plan) for plan in plans]
    for (losses, numbers), (other_losses, other_numbers) in results:
        assert losses == other_losses
        assert numbers == other_numbers
        assert losses[0] != losses[1]
        assert numbers[0] != numbers[1]
        torch.testing.assert_close(losses, results[0][0][0])
