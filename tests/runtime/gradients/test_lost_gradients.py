"""A step that cannot train what it should is refused in its first ops; what plain PyTorch leaves untrained stays so."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rota import Cluster, Costs, Pipeline, Plan, place
from rota.schedules import NAMED
from support.networks import assert_as_unsplit, batch_of, chain, gradients_of, loss_fn, refusal, stages_of
from support.pool import Pool, on_ranks

B, IW, R = Costs.uniform(3), Costs.uniform(3, weight_us=1), Costs.uniform(3, recompute_us=1)


def plan_for(costs: Costs) -> Plan:
    """On two ranks, the last two stages on one."""
    return NAMED["gpipe"](place(costs, Cluster.uniform(2), [0, 1, 1]), 2)


def detached(output: Tensor, target: Tensor) -> Tensor:
    return loss_fn(output, target).detach()


def of_a_number(output: Tensor, target: Tensor) -> Tensor:
    return torch.tensor(loss_fn(output, target).item())


@torch.no_grad()
def without_gradients(output: Tensor, target: Tensor) -> Tensor:
    return loss_fn(output, target)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target.argmax(1)).sum()


def layer(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x).tanh()


def without_gradient(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x).detach()


Case = tuple[Plan, Callable[..., Tensor], int | None, Any]


def steps_told(rank: int, cases: list[Case]) -> list[str]:
    """What the step of each case raises."""
    message = []
    for plan, loss_of, stops_at in cases:
        stages = stages_of(*(without_gradient if stage == stops_at else layer for stage in range(3)))
        with Pipeline(stages, plan, loss_of) as pipeline:
            message.append(refusal(pipeline.step, *batch_of(2)))
        assert not gradients_of(stages, range(3))
    return message


@pytest.mark.parametrize("costs", [B, IW, R], ids=["B", "I and W", "R"])
@pytest.mark.parametrize("loss_of", [detached, of_a_number, without_gradients, accuracy])
def test_a_loss_without_gradient(pool: Pool, loss_of: Callable[..., Tensor], costs: Costs) -> None:
    plan = NAMED["gpipe"](place(costs, Cluster.uniform(1), [0, 0, 0]), 2)
    for message in pool.run(1, steps_told, [(plan, loss_of, None)])[0]:
        assert "loss_fn returned a loss without gradient for an output that has one; leave out detach()" in message


@pytest.mark.parametrize("costs", [B, IW, R], ids=["B", "I and W", "R"])
def test_stages_that_nothing_trains(pool: Pool, costs: Costs) -> None:
    plan = NAMED["gpipe"](place(costs, Cluster.uniform(1), [0, 0, 0]), 2)
    message = pool.run(1, steps_told, [(plan, loss_fn, 1), (plan, loss_fn, 2)])[0]
    assert "what stage 1 returns has no gradient, so nothing before it would be trained" in message[0]
    assert "what stage 2, the last one, returns has no gradient" in message[1]


MODES = {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad}


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_a_step_where_no_gradients_are_made(rank: int, mode: str) -> None:
    stages = chain(3)
    with Pipeline(stages, plan_for(B), loss_fn) as pipeline, MODES[mode]():
        message = refusal(pipeline.step, *batch_of(2))
    assert not gradients_of(stages, range(3))
    assert f"step runs under torch.{mode}(), but it makes gradients; leave that out, or use evaluate" in message


@on_ranks(2)
def test_evaluating_needs_no_gradients(rank: int) -> None:
    """Losses that a step would refuse, as they have no gradient."""
    contexts: list[AbstractContextManager[Any]] = [nullcontext(), torch.no_grad(), torch.inference_mode()]
    expected = loss_fn(chain(3).run(batch_of(2)[0]), batch_of(2)[1]).item()
    with Pipeline(chain(3), plan_for(B), detached) as pipeline:
        for context in contexts:
            with context:
                assert pipeline.evaluate(*batch_of(2)) == pytest.approx(expected, rel=1e-12)


def with_aside(linear: nn.Linear, x: Tensor, aside: Tensor) -> Tensor:
    return linear(x) * torch.sigmoid(aside)


def test_what_plain_pytorch_leaves_untrained(pool: Pool) -> None:
    """The weights of a first stage; and a path without gradient, behind a stage that is trained by another path."""
    cases, edges = [], [(0, 2), (0, 1), (1, 2)]
    for costs in (B, IW):
        cases.append((stages_of(without_gradient, layer, layer), plan_for(costs), [batch_of(2)]))
        plan = NAMED["gpipe"](place(costs, Cluster.uniform(2), [0, 1, 1], edges), 2)
        cases.append((stages_of(layer, without_gradient, with_aside, edges=edges), plan, [batch_of(2)]))
    assert_as_unsplit(pool, 2, cases)
