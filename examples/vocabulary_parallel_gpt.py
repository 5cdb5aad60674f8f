"""A GPT whose embedding is dealt to all ranks by rows, with its blocks in a chain (the M shape).

torchrun --nproc-per-node 4 examples/vocabulary_parallel_gpt.py     a quarter of the vocabulary on each of four
python examples/vocabulary_parallel_gpt.py                          the same training on one, with the same losses
"""

import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import rota
from rota import spmd
from rota.demo.model import Block

NUM_RANKS, NUM_MICROBATCHES, NUM_STEPS = 4, 4, 10
VOCABULARY, WIDTH, LENGTH = 256, 32, 32

torch.set_default_dtype(torch.float64)
data = torch.Generator().manual_seed(1)  # of its own: a pipeline draws from the global one for dropout
text = torch.tensor(list(Path(__file__).read_bytes()))


class VocabularyParallelEmbedding(nn.Module):
    """Each rank of `group` holds an equal part of the rows; without a group one holds them all."""

    def __init__(self, group: spmd.Group) -> None:
        super().__init__()
        whole = 0.02 * torch.randn(VOCABULARY, WIDTH)  # drawn on every rank: later draws stay the same
        self.group, size = group, VOCABULARY // (group.size() if group else 1)
        self.first = group.rank() * size if group else 0
        self.weight = nn.Parameter(whole[self.first : self.first + size].clone())

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) -> (batch, length, width), the same on all ranks."""
        own = tokens - self.first
        is_here = (own >= 0) & (own < len(self.weight))
        rows = functional.embedding(own * is_here, self.weight) * is_here[..., None]
        return spmd.sum_over_ranks(rows, self.group)


def make_stages(group: spmd.Group) -> rota.Stages:
    torch.manual_seed(0)
    embedding = VocabularyParallelEmbedding(group)
    blocks: list[nn.Module] = [Block(WIDTH, num_heads=4) for _ in range(NUM_RANKS)]
    blocks[-1] = nn.Sequential(blocks[-1], nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
    return rota.Stages([embedding, *blocks])


def make_batch() -> tuple[Tensor, Tensor]:
    """This file's bytes, and those that follow them."""
    starts = torch.randint(len(text) - LENGTH, (16, 1), generator=data)
    return text[starts + torch.arange(LENGTH)], text[starts + torch.arange(LENGTH) + 1]


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_on_one_process() -> None:
    stages = make_stages(group=None)
    optimizer = torch.optim.Adam((parameter for _, parameter in stages.named_parameters()), lr=1e-2)
    for step in range(NUM_STEPS):
        tokens, targets = make_batch()
        loss = loss_fn(stages.run(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.9f}")


def train_on_four() -> None:
    costs = rota.Costs.uniform(1 + NUM_RANKS, forward_us=100, backward_us=200)
    ranks = [range(NUM_RANKS), *range(NUM_RANKS)]  # the embedding on all, block i on rank i
    plan = rota.schedules.gpipe(rota.place(costs, rota.Cluster.uniform(NUM_RANKS), ranks), NUM_MICROBATCHES)
    stages = make_stages(spmd.group(range(NUM_RANKS)))
    with rota.Pipeline(stages, plan, loss_fn) as pipeline:
        optimizer = torch.optim.Adam(pipeline.parameters(), lr=1e-2)
        for step in range(NUM_STEPS):
            loss = pipeline.step(*make_batch())
            optimizer.step()
            optimizer.zero_grad()
            if pipeline.rank == 0:
                print(f"step {step}: loss {loss:.9f}")


if __name__ == "__main__":
    train_on_four() if "RANK" in os.environ else train_on_one_process()
