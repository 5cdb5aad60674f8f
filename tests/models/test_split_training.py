"""Stages of a split model train with what each rank is given of the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rota import Cluster, Costs, CutPoint, Plan, Stages, place, split
from rota.schedules import one_f_one_b
from support.networks import WIDTH, StepResult, assert_equal_steps, pipeline_steps, serial_step
from support.pool import Pool

pytestmark = pytest.mark.dist


class Model(nn.Module):
    """The mask is read by the last two layers alone, the shift by the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.cuts = [CutPoint() for _ in range(3)]

    def forward(self, x: Tensor, shift: Tensor, mask: Tensor) -> Tensor:
        x = self.cuts[0](torch.tanh(self.layers[0](x)))
        x = self.cuts[1](torch.tanh(self.layers[1](x + shift)))
        x = self.cuts[2](torch.tanh(self.layers[2](x * mask)))
        return self.layers[3](x * mask)


def step(rank: int, stages: Stages, plan: Plan, inputs: list[Any], targets: Tensor) -> StepResult:
    """`inputs[rank]` is all that the rank is given."""
    (result,) = pipeline_steps(rank, stages, plan, [(inputs[rank], targets if rank == stages.sink else None)])
    return result


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("given", ["dict", "own entries", "tuple"])
def test_inputs_are_read_where_they_are_used(pool: Pool, num_stages: int, given: str) -> None:
    torch.manual_seed(2)
    x, shift, mask, targets = torch.randn(4, 8, WIDTH, dtype=torch.float64)
    batch = {"x": x, "shift": shift, "mask": mask}
    stages = split(Model().double(), num_stages, example=batch)
    inputs: list[Any] = [
        (tuple(batch.values()) if given == "tuple" else batch) if read else None for read in stages.inputs
    ]
    if given == "own entries":
        inputs = [{str(name): batch[str(name)] for name in read} or None for read in stages.inputs]
    plan = one_f_one_b(place(Costs.uniform(num_stages), Cluster.uniform(num_stages)), 4)
    by_rank = pool.run(num_stages, step, stages, plan, inputs, targets)
    assert_equal_steps(by_rank, serial_step(stages, batch, targets))
