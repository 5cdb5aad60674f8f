"""Modules for a stage on several ranks; without a group each is the whole, with the same weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rota import spmd

WIDTH, HIDDEN = 6, 12


class ParallelLayer(nn.Module):
    """A residual MLP whose hidden layer is dealt to the ranks, and a bias that each of them holds."""

    def __init__(self, seed: int, group: spmd.Group) -> None:
        super().__init__()
        torch.manual_seed(seed)
        up, down, self.out = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.group = group
        self.up, self.up_bias = part(up.weight, group, 0), part(up.bias, group, 0)
        self.down = part(down.weight, group, 1)
        spmd.replicated(self.out)
        self.double()

    def forward(self, *values: Tensor) -> Tensor:
        x = torch.stack(values).sum(0)
        own = torch.tanh(nn.functional.linear(spmd.copy_to_ranks(x, self.group), self.up, self.up_bias))
        return x + self.out(spmd.sum_over_ranks(own @ self.down.T, self.group))


class GatheredLayer(nn.Module):
    """A layer whose outputs are dealt to the ranks and put together again."""

    def __init__(self, seed: int, group: spmd.Group) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.group = group
        self.weight = part(nn.Linear(WIDTH, WIDTH).weight.double(), group, 0)

    def forward(self, *values: Tensor) -> Tensor:
        x = spmd.copy_to_ranks(torch.stack(values).sum(0), self.group)
        return spmd.gather_from_ranks(torch.sin(x @ self.weight.T), self.group)


def part(weight: Tensor, group: spmd.Group, dim: int) -> nn.Parameter:
    """This rank's part of a weight."""
    if group is None:
        return nn.Parameter(weight.detach().clone())
    return nn.Parameter(weight.detach().chunk(group.size(), dim)[group.rank()].clone())


def own_part(whole: Tensor, part: Tensor, position: int) -> Tensor:
    """What of the unsplit model's tensor the rank at this position of a stage has, by the shape of its part."""
    for dim in range(whole.dim()):
        if whole.shape[dim] != part.shape[dim]:
            return whole.narrow(dim, position * part.shape[dim], part.shape[dim])
    return whole
