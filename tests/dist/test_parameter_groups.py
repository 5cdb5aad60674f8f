"""Groups of parameters, several optimizers and schedulers work on a rank's parameters as on the whole model's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

import rota
from dist.meshed import part_of
from dist.networks import WIDTH, batch_of, loss_fn
from dist.pool import Pool
from rota import Cluster, Costs, Pipeline, Plan, Stages
from rota.schedules import NAMED

NUM_MICROBATCHES, NUM_STEPS = 4, 12
Named = Iterable[tuple[str, nn.Parameter]]


class Training:
    """Decay for matrices alone, a frozen norm, slow biases by another optimizer; one rate follows the loss."""

    def __init__(self, named: Named) -> None:
        matrices, norms, biases = [], [], []
        for name, parameter in named:
            (norms if "norm" in name else biases if name.endswith("bias") else matrices).append(parameter)
        for parameter in norms:
            parameter.requires_grad_(False)
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0, "lr": 0.0}]
        self.optimizers: list[Optimizer] = [AdamW(groups, lr=0.02), SGD(biases, lr=0.05, momentum=0.9)]
        self.by_step = LambdaLR(self.optimizers[0], [lambda s: min(1, (s + 1) / 4), lambda s: math.cos(s / NUM_STEPS)])
        self.by_loss = ReduceLROnPlateau(self.optimizers[1], factor=0.5, patience=0, threshold=0.05)

    def step(self, loss: float, norm: float) -> list[float]:
        """What is to be the same on every rank and in the unsplit model."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.by_step.step()
        self.by_loss.step(loss)
        return [loss, norm, *(group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups)]


def make_stages() -> Stages:
    torch.manual_seed(7)
    modules = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    for module in modules:
        module.add_module("norm", nn.LayerNorm(WIDTH))
    return Stages([module.double() for module in modules])


def batches() -> list[tuple[Tensor, Tensor]]:
    return [batch_of(2 * NUM_MICROBATCHES, seed % 3) for seed in range(NUM_STEPS)]


def train(rank: int, plan: Plan) -> tuple[list[Any], dict[tuple[int, str], Tensor]]:
    mesh, stages, seen = rota.mesh(pp=2, dp=2), make_stages(), []
    with Pipeline(stages, plan, loss_fn, mesh=mesh) as pipeline:
        training = Training(pipeline.named_parameters())
        for batch in batches():
            loss = pipeline.step(*part_of(batch, pipeline))
            seen.append(training.step(loss, pipeline.clip_grad_norm_(0.2, norm_type=math.inf)))
        local = pipeline.local_stages
    return seen, {(s, name): p.detach() for s in local for name, p in stages[s].named_parameters()}


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zb_v"])
def test_groups_and_schedulers(pool: Pool, schedule: str) -> None:
    family = NAMED[schedule]
    costs = family.costs_from(Costs.uniform(2, 10, 10, weight_us=10 if schedule == "zb_v" else None))
    plan = family(family.place(costs, Cluster.uniform(2)), NUM_MICROBATCHES)
    by_process = pool.run(4, train, plan)
    stages, expected = make_stages(), []
    training = Training(stages.named_parameters())
    parameters = [p for _, p in stages.named_parameters()]
    for x, y in batches():
        loss = loss_fn(stages.run(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, 0.2, norm_type=math.inf)
        expected.append(training.step(loss.item(), norm.item()))
    assert len({rates[-1] for rates in expected}) > 2  # the loss has slowed the biases down, more than once
    for seen, weights in by_process:
        torch.testing.assert_close(seen, expected, rtol=1e-10, atol=1e-10)
        for (stage, name), weight in weights.items():
            torch.testing.assert_close(weight, stages[stage].get_parameter(name).detach(), rtol=1e-10, atol=1e-10)
    assert {key for _, weights in by_process for key in weights} == {
        (stage, name) for stage, module in enumerate(stages.modules) for name, _ in module.named_parameters()
    }
