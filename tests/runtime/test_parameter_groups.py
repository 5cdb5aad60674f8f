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
from rota import Cluster, Costs, Pipeline, Plan, Stages
from rota.schedules import NAMED
from support.meshed import part_of
from support.networks import WIDTH, batch_of, loss_fn
from support.pool import Pool

pytestmark = pytest.mark.dist

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
            seen.append(training.step(loss, pipeline.clip_grad_norm_(0.2, norm_type=math.inf).item()))
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


# --- names ------------------------------------------------------------------------------------------------------------


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding(x)


class Head(nn.Module):
    def __init__(self, tied: nn.Parameter) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = tied

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def alike() -> Stages:
    """Stages whose parameters have the same names."""
    return Stages([nn.Linear(WIDTH, WIDTH).double() for _ in range(4)])


def tied() -> Stages:
    """The first stage's weight is the last one's too, under another name; the ones between have names of their own."""
    first = Embedding().double()
    middle = [nn.Sequential(nn.Tanh(), *[nn.Identity()] * i, nn.Linear(WIDTH, WIDTH)).double() for i in range(2)]
    return Stages([first, *middle, Head(first.embedding.weight)])


def names_here(rank: int, cases: list[tuple[Any, Plan, Any]]) -> list[list[str]]:
    del rank
    found = []
    for make, plan in cases:
        stages = make()
        with Pipeline(stages, plan, loss_fn) as pipeline:
            named = [*pipeline.named_parameters()]
            assert [*map(id, pipeline.parameters())] == [id(parameter) for _, parameter in named]
            assert {id(p) for _, p in named} == {
                id(p) for module in pipeline.local_stages.values() for p in module.parameters()
            }
            found.append([name for name, _ in named])
    return found


def test_names_are_those_of_the_whole_model(pool: Pool) -> None:
    two_each = NAMED["interleaved_1f1b"](rota.interleaved(Costs.uniform(4), Cluster.uniform(2)), 2)
    mirrored = NAMED["chimera"](rota.bidirectional(Costs.uniform(4), Cluster.uniform(4)), 4)
    cases = [(alike, two_each), (tied, two_each)]
    by_rank = pool.run(2, names_here, cases)
    assert by_rank[0][0] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert by_rank[1][0] == ["1.weight", "1.bias", "3.weight", "3.bias"]
    assert by_rank[0][1] == ["embedding.weight", "embedding.bias", "2.weight", "2.bias"]
    assert by_rank[1][1] == ["embedding.weight", "1.weight", "1.bias"]
    by_rank = pool.run(4, names_here, [(alike, mirrored)])
    assert by_rank[0] == by_rank[3] == [["0.weight", "0.bias", "3.weight", "3.bias"]]
