"""A small causal language model in stages, samples of any length, and a loss that ignores padding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from rota import Stages
from support.chunked_gpt import IGNORED, WIDTH, WORDS, Attention, Words

LONGEST = 12


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
