"""Values that a stage does not take, and graphs that several micro-batches share, are refused with the remedy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import rota
from rota import Cluster, Costs, PipelineError, Stages
from rota.schedules import gpipe, zb_h1
from support.networks import refusal
from support.pool import Pool

pytestmark = pytest.mark.dist


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), x


class Unpacked(nn.Module):
    """As `torch.distributed.pipelining` calls it."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b


class Recurrent(nn.Module):
    """Keeps its state with the graph that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.states = nn.GRUCell(4, 4), [torch.zeros(2, 4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.states = [self.cell(x, self.states[0])]
        return self.states[0]


def _refused(_: int, make: Callable[[], nn.Module], has_graph: bool, schedule: Callable[..., rota.Plan]) -> str:
    plan = schedule(rota.place(Costs.uniform(1, weight_us=1), Cluster.uniform(1)), 2)
    inputs = torch.randn(4, 4)
    inputs = nn.Linear(4, 4)(inputs).tanh() if has_graph else inputs
    with rota.Pipeline(Stages([make()]), plan, nn.functional.mse_loss) as pipeline:
        return refusal(pipeline.step, inputs, torch.randn(4, 4))


def _linear() -> nn.Module:
    return nn.Linear(4, 4)


@pytest.mark.parametrize("schedule", [gpipe, zb_h1])
def test_graphs_that_micro_batches_share(pool: Pool, schedule: Callable[..., rota.Plan]) -> None:
    of_input = pool.run(1, _refused, _linear, True, schedule)[0]
    assert "input 0, which stage 0 reads, carries the graph" in of_input
    assert "give step the detached tensor" in of_input
    of_state = pool.run(1, _refused, Recurrent, False, schedule)[0]
    assert "states of stage 0 keeps a tensor with its graph" in of_state
    assert "keep tensor.detach()" in of_state


def _tuple(_: int) -> str:
    plan = gpipe(rota.place(Costs.uniform(2), Cluster.uniform(1), [0, 0]), 2)
    stages = Stages([Pair(), Unpacked()])
    with pytest.raises(PipelineError, match="a tuple that a stage returns is one argument"):
        stages.run(torch.randn(4, 4))
    with rota.Pipeline(stages, plan, nn.functional.mse_loss) as pipeline:
        return refusal(pipeline.step, torch.randn(4, 4), torch.randn(4, 4))


def test_a_tuple_is_one_argument(pool: Pool) -> None:
    message = pool.run(1, _tuple)[0]
    assert "stage 1 (Unpacked) is called with what stage 0 returns, which its forward does not take" in message
    assert "missing a required argument: 'b'" in message
    assert "unpack it in the forward: a, b = values" in message


class Wrong(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return len(x, x)  # type: ignore[call-arg, no-any-return]


def test_other_errors_of_a_forward_stay_as_they_are() -> None:
    with pytest.raises(TypeError, match="takes exactly one argument"):
        Stages([Wrong()]).run(torch.ones(1))
