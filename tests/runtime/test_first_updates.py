"""The first updates of weights: an optimizer with other weights, and gradients clipped by each rank's own norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Adam, AdamW, Optimizer

from rota import Cluster, Costs, Pipeline, PipelineError, Stages, place
from rota.runtime.device.host import HostDevice
from rota.runtime.first_updates import FirstUpdates
from rota.schedules import gpipe
from support.networks import WIDTH, batch_of, loss_fn
from support.pool import Pool

PLAN = gpipe(place(Costs.uniform(2), Cluster.uniform(2)), 2)
BATCH = batch_of(4)

# --- one rank ---------------------------------------------------------------------------------------------------------


def made(**options: Any) -> tuple[nn.Module, FirstUpdates]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)).double()
    return model, FirstUpdates(model.parameters(), HostDevice(), **{"compares": True} | options)


def is_watching(updates: FirstUpdates) -> bool:
    return updates._hook is not None


def backward(model: nn.Module) -> None:
    model(torch.ones(3, WIDTH, dtype=torch.float64)).square().sum().backward()


def divided(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad = parameter.grad / 4


def clipped_one_by_one(parameters: list[nn.Parameter]) -> None:
    for i, parameter in enumerate(parameters):
        clip_grad_norm_(parameter, 1e-3 * (i + 1))


def with_another_loss(parameters: list[nn.Parameter]) -> None:
    sum(parameter.square().sum() for parameter in parameters).backward()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        (lambda _: None, 1.0),
        (lambda parameters: clip_grad_norm_(parameters, 1e9), 1.0),
        (lambda parameters: clip_grad_norm_(parameters, 1e-3), None),
        (divided, 0.25),
        (clipped_one_by_one, 0.0),
        (with_another_loss, 0.0),
        (lambda parameters: clip_grad_value_(parameters, 1e-3), 0.0),
        (lambda parameters: clip_grad_norm_(parameters[0], 1e-3), 0.0),
        (lambda parameters: SGD(parameters, lr=0.1).zero_grad(), 0.0),
        (lambda parameters: SGD(parameters, lr=0.1).zero_grad(set_to_none=False), 0.0),
    ],
)
def test_the_factor_of_all_gradients_is_found(
    change: Callable[[list[nn.Parameter]], object], factor: float | None
) -> None:
    model, updates = made()
    parameters = [*model.parameters()]
    optimizer = SGD(parameters, lr=0.01)
    assert updates.begin() == 0.0
    backward(model)
    norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm().item()
    updates.end(is_scaled=False)
    change(parameters)
    optimizer.step()
    optimizer.zero_grad()
    assert updates.begin() == pytest.approx(1e-3 / norm if factor is None else factor, rel=1e-4)
    updates.close()
    assert not is_watching(updates)


def test_gradients_that_are_scaled_for_all_are_not_compared_with_unscaled_ones() -> None:
    """A fused optimizer takes the scaler's factor out while it steps, another one does so before."""
    for unscales, factor in ((True, 1 / 4), (False, 0.0)):
        model, updates = made()
        optimizer = SGD(model.parameters(), lr=0.01)
        backward(model)
        updates.end(is_scaled=True)
        if unscales:
            divided([*model.parameters()])
        optimizer.step()
        assert updates.begin() == pytest.approx(factor)
        updates.close()


def test_a_script_that_leaves_gradients_alone_is_watched_for_three_steps() -> None:
    model, updates = made()
    optimizer = SGD(model.parameters(), lr=0.01)
    for step in range(4):
        updates.begin()
        assert is_watching(updates) == (0 < step < 3)
        backward(model)
        updates.end(is_scaled=False)
        optimizer.step()
    assert updates.begin() == 0.0


def test_one_that_clips_is_watched_at_ever_rarer_steps() -> None:
    """Clipping may have no effect in the first steps."""
    model, updates = made()
    optimizer = SGD(model.parameters(), lr=0.01)
    found = []
    for step in range(17):
        if updates.begin():
            found.append(step)
        optimizer.zero_grad()
        backward(model)
        updates.end(is_scaled=False)
        clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
    assert updates.begin() == 0.0
    assert found == [1, 2, 3, 4, 8, 16]
    updates.close()


def test_a_rank_without_others_is_watched_until_its_optimizer_steps() -> None:
    model, updates = made(compares=False)
    optimizer = SGD(model.parameters(), lr=0.01)
    backward(model)
    updates.end(is_scaled=False)
    optimizer.step()
    assert updates.begin() == 0.0
    assert not is_watching(updates)


def test_steps_without_an_update_say_nothing() -> None:
    model, updates = made()
    for _ in range(5):
        assert updates.begin() == 0.0
        backward(model)
        updates.end(is_scaled=False)
        divided([*model.parameters()])
    updates.close()


@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_an_optimizer_of_another_copy_is_refused(kind: Callable[..., Optimizer]) -> None:
    (model, updates), (other, _) = made(), made()
    optimizer = kind(other.parameters(), lr=0.01)
    backward(model)
    updates.end(is_scaled=False)
    optimizer.step()
    with pytest.raises(PipelineError, match=r"step\(\) was called, but this optimizer has none of the weights of this"):
        updates.begin()
    assert not is_watching(updates)


@pytest.mark.parametrize("how", ["own too", "by hand", "other trained"])
def test_another_optimizer_beside_the_pipelines_own_is_right(how: str) -> None:
    (model, updates), (other, _) = made(), made()
    optimizer, another = SGD(model.parameters(), lr=0.01), SGD(other.parameters(), lr=0.01)
    backward(model)
    updates.end(is_scaled=False)
    if how == "other trained":
        backward(other)
    another.step()
    if how == "own too":
        optimizer.step()
    elif how == "by hand":
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad)
    updates.begin()
    updates.close()


# --- two ranks --------------------------------------------------------------------------------------------------------

Clip = Callable[[Pipeline], object]


def make_stages() -> Stages:
    torch.manual_seed(7)
    return Stages([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(2)])


def steps_of(clip: Clip, parameters: Callable[[Pipeline], Any], num_steps: int) -> tuple[int, str]:
    """How many steps were made, and why no more."""
    with Pipeline(make_stages(), PLAN, loss_fn) as pipeline:
        optimizer = Adam(parameters(pipeline), lr=0.01)
        for step in range(num_steps):
            try:
                optimizer.zero_grad()
                pipeline.step(*BATCH)
            except PipelineError as error:
                return step, str(error)
            clip(pipeline)
            optimizer.step()
    return num_steps, ""


def train_wrongly(rank: int) -> list[tuple[int, str]]:
    def own(pipeline: Pipeline) -> Any:
        return pipeline.parameters()

    return [
        steps_of(lambda p: clip_grad_norm_(p.parameters(), 1e-3), own, 4),
        steps_of(lambda _: None, lambda _: make_stages()[rank].parameters(), 4),
        steps_of(lambda p: p.clip_grad_norm_(1e-3), own, 4),
        steps_of(lambda p: divided([*p.parameters()]), own, 4),
        steps_of(lambda _: None, own, 4),
    ]


@pytest.mark.dist
def test_mistakes_of_a_loop_are_refused_on_all_ranks(pool: Pool) -> None:
    by_rank = pool.run(2, train_wrongly)
    assert by_rank[0] == by_rank[1]
    (clipped, told), (idle, told_of_idle), *right = by_rank[0]
    assert (clipped, idle) == (1, 1)
    assert told.startswith("after the last step, before its update, the gradients were multiplied by ")
    assert " on rank 0 and by " in told or " on rank 1 and by " in told
    assert "use pipeline.clip_grad_norm_" in told
    assert told_of_idle.startswith("Adam.step() was called, but this optimizer has none of the weights of this rank's ")
    assert right == [(4, "")] * 3
