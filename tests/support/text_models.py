"""A small causal language model in stages, samples of any length, and a loss that ignores padding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from rota import Stages

WORDS, WIDTH, LONGEST, IGNORED = 11, 6, 12, -100


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        return self.words(words) + self.places.weight[: words.shape[1]]


class Attention(nn.Module):
    """Causal, so that padding at the end of a sample changes nothing before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + torch.tanh(self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True)))


def text_stages(num_stages: int) -> Stages:
    torch.manual_seed(0)
    middle = [Attention() for _ in range(num_stages - 2)]
    return Stages([module.double() for module in (Words(), *middle, nn.Linear(WIDTH, WORDS))])


def summed_loss(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    flat = output.flatten(0, 1), labels.flatten()
    return functional.cross_entropy(*flat, ignore_index=IGNORED, reduction="sum"), (labels != IGNORED).sum()


def samples(lengths: list[int], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(WORDS, (length + 1,), generator=generator) for length in lengths]
