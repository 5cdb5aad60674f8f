"""A small causal GPT, samples of any length, and a loss that ignores padding.

It can run in chunks: it has places from an embedding, and rotated keys in its second block.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from rota import Stages, chunk_start, with_earlier_chunks
from support.networks import StepResult, gradients_of

WORDS, IGNORED, WIDTH, HEADS, LONGEST = 11, -100, 12, 2, 24


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        start = chunk_start()
        return self.words(words) + self.places.weight[start : start + words.shape[1]]


def rotated(x: Tensor, start: int) -> Tensor:
    half = x.shape[-1] // 2
    places = torch.arange(start, start + x.shape[-2], dtype=x.dtype, device=x.device)
    angles = places[:, None] / torch.arange(1, half + 1, dtype=x.dtype, device=x.device)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Attention(nn.Module):
    def __init__(self, *, rotates: bool = False, joins: bool = True, is_causal: bool = True, drop: float = 0.0) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rotates, self.joins, self.is_causal, self.drop = rotates, joins, is_causal, nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        if self.rotates:
            q, k = rotated(q, chunk_start()), rotated(k, chunk_start())
        if self.joins:
            k, v = with_earlier_chunks(k, v)
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=x.device).tril(k.shape[-2] - q.shape[-2])
        y = functional.scaled_dot_product_attention(q, k, v, mask if self.is_causal else None)
        return x + self.drop(torch.tanh(self.out(y.transpose(1, 2).flatten(2))))


def gpt_stages(num_stages: int, **last: bool) -> Stages:
    """Four blocks in as many stages as there are; `last`: of the last block."""
    torch.manual_seed(0)
    blocks = [Attention(), Attention(rotates=True), Attention(), Attention(**last)]
    modules = [Words(), *blocks, nn.Linear(WIDTH, WORDS)]
    ends = [round(len(modules) * stage / num_stages) for stage in range(num_stages + 1)]
    parts = [nn.Sequential(*modules[a:b]).double() for a, b in pairwise(ends)]
    return Stages(parts)


def tokens(rows: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets; some targets do not count."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(WORDS, (rows, length + 1), generator=generator)
    targets = words[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = IGNORED
    return words[:, :-1].contiguous(), targets


def samples(lengths: list[int], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(WORDS, (length + 1,), generator=generator) for length in lengths]


def step_by_sample(num_stages: int, samples: list[Tensor]) -> StepResult:
    """The unsplit model on the whole batch, sample by sample, without any padding."""
    stages = gpt_stages(num_stages)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sample in samples:
        loss, _ = summed_loss(stages.run(sample[None, :-1]), sample[None, 1:])
        total, count = total + loss, count + len(sample) - 1
    (total / count).backward()
    return StepResult(float(total.detach()) / count, gradients_of(stages, range(num_stages)))


def summed_loss(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    flat = output.flatten(0, 1), labels.flatten()
    return functional.cross_entropy(*flat, ignore_index=IGNORED, reduction="sum"), (labels != IGNORED).sum()
