"""Models cut by `split` train on several processes as they do on one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rota import Cluster, Costs, CutPoint, Pipeline, Plan, Stages, place, split
from rota.schedules import NAMED
from support.pool import Pool

pytestmark = pytest.mark.dist

WORDS, WIDTH, LENGTH = 11, 8, 6


class Block(nn.Module):
    """Causal attention; `mask` [rows, length] tells which tokens may be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        if mask is not None:
            allowed = allowed & mask[:, None, :]
        return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=allowed))


class GPT(nn.Module):
    """The mask is read by the last two blocks alone, the positions by the second block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)
        self.cuts = [CutPoint() for _ in range(3)]

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        x = self.cuts[0](self.blocks[0](self.embed(tokens)))
        x = self.cuts[1](self.blocks[1](x + self.place(positions)))
        x = self.cuts[2](self.blocks[2](x, mask))
        return self.head(self.blocks[3](x, mask))


class Skips(nn.Module):
    """What the first stage makes is read again by the third and the last."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)
        self.cuts = [CutPoint() for _ in range(3)]

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.a(x))
        y = self.cuts[0](first * 2)
        y = self.cuts[1](torch.tanh(self.b(y)))
        y = self.cuts[2](torch.tanh(self.c(y)) + first)
        return self.head(self.d(y) * first.mean(-1, keepdim=True))


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def train_one_step(rank: int, stages: Stages, plan: Plan, inputs: list[Any], targets: Tensor, steps: int) -> Any:
    """The loss and the rank's gradients by name; `inputs[stage]` is all that the stage's rank is given."""
    with Pipeline(stages, plan, cross_entropy) as pipeline:
        for _ in range(steps):
            for parameter in pipeline.parameters():
                parameter.grad = None
            (stage,) = pipeline.local_stages
            loss = pipeline.step(inputs[stage], targets if stage == stages.sink else None)
        names = {name for name, _ in pipeline.named_parameters()}
        return loss, {name: p.grad for name, p in stages.named_parameters() if name in names}


def check_against(pool: Pool, model: nn.Module, num_stages: int, batch: Any, targets: Tensor, inputs: Any) -> None:
    serial = copy.deepcopy(model)
    loss = cross_entropy(serial(*batch), targets)
    loss.backward()
    stages = split(model, num_stages, example=batch, direct_skips=True)
    edges = [edge[:2] for edge in stages.edges]
    placement = place(Costs.uniform(num_stages, edges=edges), Cluster.uniform(num_stages))
    for schedule in ("gpipe", "1f1b"):
        plan = NAMED[schedule](placement, 4)
        by_rank = pool.run(num_stages, train_one_step, stages, plan, inputs(stages), targets, 2)
        gradients = {name: gradient for _, of_rank in by_rank for name, gradient in of_rank.items()}
        assert gradients.keys() == dict(serial.named_parameters()).keys()
        for name, parameter in serial.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-10)
        assert all(abs(loss.item() - of_rank) < 1e-10 for of_rank, _ in by_rank)


def gpt_batch(rows: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    mask = torch.rand(rows, LENGTH, generator=generator) > 0.3
    mask[:, 0] = True
    return {
        "tokens": torch.randint(0, WORDS, (rows, LENGTH), generator=generator),
        "positions": torch.arange(LENGTH).flip(0).expand(rows, LENGTH),
        "mask": mask,
    }


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("given", ["dict", "own entries", "tuple"])
def test_inputs_are_read_where_they_are_used(pool: Pool, num_stages: int, given: str) -> None:
    torch.manual_seed(2)
    batch, targets = gpt_batch(), torch.arange(8 * LENGTH).reshape(8, LENGTH) % WORDS

    def inputs(stages: Stages) -> list[Any]:
        everything: Any = tuple(batch.values()) if given == "tuple" else batch
        if given == "own entries":
            return [{name: batch[str(name)] for name in read} or None for read in stages.inputs]
        return [everything if read else None for read in stages.inputs]

    check_against(pool, GPT().double(), num_stages, tuple(batch.values()), targets, inputs)


@pytest.mark.parametrize("num_stages", [3, 4])
def test_skip_over_stages(pool: Pool, num_stages: int) -> None:
    torch.manual_seed(3)
    x, targets = torch.randn(8, WIDTH, dtype=torch.float64), torch.arange(8) % WORDS
    model = Skips().double()
    assert (0, num_stages - 1) in {
        edge[:2] for edge in split(copy.deepcopy(model), num_stages, example=(x,), direct_skips=True).edges
    }
    check_against(pool, model, num_stages, (x,), targets, lambda s: [x if read else None for read in s.inputs])


def test_sequential(pool: Pool) -> None:
    torch.manual_seed(4)
    x, targets = torch.randn(8, WIDTH, dtype=torch.float64), torch.arange(8) % WORDS
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WORDS)]
    model = nn.Sequential(*layers)
    check_against(pool, model.double(), 3, (x,), targets, lambda stages: [x, None, None])
