"""`rota.add_loss` outside of a pipeline."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rota
from rota import CutPoint, PipelineError, SplitError


class Balanced(nn.Module):
    """Adds the mean square of what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        rota.add_loss(0.5 * x.square().mean(), count=len(x))
        return x


def test_collected_in_order_and_trained() -> None:
    model, x = nn.Sequential(Balanced(), Balanced()), torch.randn(4, 3)
    with rota.collect_losses() as added:
        output = model(x)
    first, second = (loss.value for loss in added.losses)
    assert added.total == first + second
    assert added.weighted_total == 4 * (first + second)
    assert second == 0.5 * output.square().mean()
    (output.sum() + added.total).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_lost_losses_are_said_where_they_would_train() -> None:
    with pytest.warns(UserWarning, match="rota.add_loss is called outside of a Pipeline"):
        Balanced()(torch.ones(2, 3))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        Balanced()(torch.ones(2, 3))


@pytest.mark.parametrize(
    ("value", "count", "message"),
    [
        (1.0, None, "rota.add_loss got 1.0; give a real tensor with one element"),
        (torch.zeros(2), None, r"rota.add_loss got torch.float32 of shape \[2\]"),
        (torch.zeros((), dtype=torch.complex64), None, "complex64"),
        (torch.zeros(()), -1, "rota.add_loss got count=-1"),
        (torch.zeros(()), math.inf, "rota.add_loss got count=inf"),
    ],
)
def test_other_values_are_refused(value: Any, count: Any, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        rota.add_loss(value, count)


def test_a_loss_without_count_has_no_weight() -> None:
    with rota.collect_losses() as added:
        rota.add_loss(torch.ones(()))
    with pytest.raises(PipelineError, match="a loss was added without a count"):
        _ = added.weighted_total


class AddsBetween(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.cut, self.second = nn.Linear(3, 3), CutPoint(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(self.first(x))
        rota.add_loss(x.mean())
        return self.second(x)


def test_a_call_that_several_stages_would_make_is_refused() -> None:
    with pytest.raises(SplitError, match="add_loss is called between modules, in code that several stages run"):
        rota.split(AddsBetween(), 2, example=torch.ones(2, 3))


def test_a_checkpointed_block_adds_once() -> None:
    model, x = Balanced(), torch.randn(4, 3)
    with rota.collect_losses() as added:
        output = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    assert len(added.losses) == 1
    with rota.collect_losses():
        (output.sum() + added.total).backward()
    assert len(added.losses) == 1
