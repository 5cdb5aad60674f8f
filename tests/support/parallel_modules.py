"""Modules for a stage on several ranks, without a group the whole ones; and steps, compared by parts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rota import Pipeline, Stages, spmd
from support.networks import StepResult, clear, gradients_of, serial_step

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


MAX_NORM = 0.1
Normed = tuple[StepResult, float]  # with the norm of all gradients before they are clipped


def normed_step(pipeline: Pipeline, *batch: Any) -> Normed:
    clear(pipeline)
    loss = pipeline.step(*batch)
    norm = pipeline.clip_grad_norm_(MAX_NORM).item()
    return StepResult(loss, gradients_of(pipeline.stages, pipeline.local_stages)), norm


def assert_equal_normed(
    by_rank: list[list[Normed]],
    stages: Stages,
    batches: list[Any],
    position: Callable[[int, int], int] = lambda rank, stage: 0,
) -> None:
    """Losses, norms and clipped gradients are the unsplit model's; a rank has a stage's part at its `position`."""
    for step, batch in enumerate(batches):
        clear(stages)
        loss = serial_step(stages, *batch).loss
        norm = nn.utils.clip_grad_norm_([p for _, p in stages.named_parameters()], MAX_NORM).item()
        assert norm > MAX_NORM
        gradients, found = gradients_of(stages, range(len(stages))), set()
        for rank, (result, of_rank) in enumerate(results[step] for results in by_rank):
            assert abs(result.loss - loss) < 1e-10
            assert abs(of_rank - norm) < 1e-10
            for (stage, name), gradient in result.gradients.items():
                key = stage % len(stages), name
                found.add(key)
                own = own_part(gradients[key], gradient, position(rank, stage))
                torch.testing.assert_close(gradient, own, rtol=1e-10, atol=1e-10)
        assert found == gradients.keys()
