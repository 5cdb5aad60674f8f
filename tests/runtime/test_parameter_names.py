"""A rank's parameters have the names that they have in the whole model."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

import rota
from rota import Cluster, Costs, Pipeline, Plan, Stages
from rota.schedules import NAMED
from support.networks import WIDTH, loss_fn
from support.pool import Pool

pytestmark = pytest.mark.dist


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
