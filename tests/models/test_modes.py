"""A model that is trained in eval(): where that makes a difference."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rota import Cluster, Costs, Pipeline, Stages, place
from rota.models.modes import warn_of_eval_mode
from rota.schedules import gpipe
from support.networks import WIDTH, batch_of, loss_fn
from support.pool import Pool


class Functional(nn.Module):
    """As attention in transformers: a rate, which may be 0, and a forward that asks for the mode."""

    def __init__(self, attention_dropout: float) -> None:
        super().__init__()
        self.attention_dropout = attention_dropout

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.attention_dropout if self.training else 0.0)


def told(*modules: nn.Module) -> list[str]:
    """What is said of stages that end with these modules, and are in the mode of their last one."""
    stages = [nn.Sequential(nn.Linear(2, 2), module) for module in modules]
    for stage, module in zip(stages, modules, strict=True):
        stage.training = module.training
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_eval_mode(stages)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    "module",
    [
        nn.Dropout(0.1),
        nn.BatchNorm1d(2),
        nn.LSTM(2, 2, num_layers=2, dropout=0.1),
        nn.MultiheadAttention(2, 1, dropout=0.1),
        Functional(0.1),
    ],
)
def test_modules_that_depend_on_the_mode(module: nn.Module) -> None:
    (message,) = told(nn.Identity().eval(), module.eval())
    assert f"in which {type(module).__name__} 1 of stage 1 do as in evaluation" in message
    assert "call model.train() before rota.split" in message
    assert not told(nn.Identity().eval(), module.train())


@pytest.mark.parametrize(
    "module",
    [nn.Dropout(0.0), nn.BatchNorm1d(2, track_running_stats=False), nn.MultiheadAttention(2, 1), Functional(0.0)],
)
def test_modules_that_do_not(module: nn.Module) -> None:
    assert not told(module.eval())


def test_a_batchnorm_that_keeps_its_statistics_is_left_alone() -> None:
    assert not told(nn.BatchNorm1d(2).eval(), nn.Dropout(0.1))


def train(rank: int) -> list[str]:
    """With an evaluation before, and two steps, of a model as `from_pretrained` returns it."""
    torch.manual_seed(0)
    stages = Stages([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)).double().eval() for _ in range(2)])
    plan: Any = gpipe(place(Costs.uniform(2), Cluster.uniform(2)), 2)
    found = []
    with Pipeline(stages, plan, loss_fn) as pipeline, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in (pipeline.evaluate, pipeline.step, pipeline.step):
            call(*batch_of(2))
            found.append(str(len(caught)))
    return found


@pytest.mark.dist
def test_it_is_said_once_and_on_one_rank_at_the_first_training_step(pool: Pool) -> None:
    assert pool.run(2, train) == [["0", "1", "1"], ["0", "0", "0"]]
