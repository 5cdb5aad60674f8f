"""Unmodified models in stages give the loss, gradients and buffers of the whole, also for shapes not recorded."""

from typing import Any

import pytest
import torch
from torch import nn

from rota import Stages, split
from rota.models import finest
from rota.runtime.gradients.forward_backward import StageForward, backward, keep_loss
from rota.runtime.messages import hand_over
from support.hf_models import CASES, ModelCase


def staged_step(stages: Stages, case: ModelCase, batch: dict[str, Any]) -> float:
    """A forward and backward of all stages with the runtime's functions, their boundaries cut; the loss."""
    kept, values, gradients, loss = {}, {}, {}, 0.0
    for stage in stages.order():
        received = [hand_over(values[edge]) for edge in stages.incoming(stage)]
        output, made, kept[stage] = StageForward(stages, stage)(received, batch)
        values |= zip(stages.outgoing(stage), made, strict=True)
        if stage == stages.sink:
            root = case.loss_fn(output, case.make_targets(batch))
            keep_loss(kept[stage], root, 1.0)
            loss = root.item()
    for stage in reversed(stages.order()):
        made = backward(kept[stage], [gradients[edge] for edge in stages.outgoing(stage)])
        gradients |= zip(stages.incoming(stage), made, strict=True)
    return loss


def whole_step(model: nn.Module, case: ModelCase, batch: dict[str, Any]) -> float:
    loss = case.loss_fn(model(**batch), case.make_targets(batch))
    loss.backward()
    return loss.item()


def assert_as_whole(
    stages: Stages, model: nn.Module, case: ModelCase, batch: dict[str, Any], tolerance: float = 1e-12
) -> None:
    """Runs both, on the same parameters and buffers."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.zero_grad()
    expected_loss = whole_step(model, case, batch)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    expected_buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    model.zero_grad()
    assert staged_step(stages, case, batch) == pytest.approx(expected_loss, abs=tolerance)
    for name, parameter in model.named_parameters():
        gradient, wanted = parameter.grad, expected[name]
        if gradient is None or wanted is None:
            assert not any(one is not None and one.any() for one in (gradient, wanted)), name
        else:
            torch.testing.assert_close(gradient, wanted, rtol=tolerance, atol=tolerance, msg=name)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected_buffers[name]), name


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_whole_model(name: str) -> None:
    case = CASES[name]
    model = case.make_model()
    example = case.make_batch(2, 8, 0)
    for num_stages in (2, 4):
        stages = split(model, num_stages, case.cuts, example=example)
        for rows, length in ((2, 8), (3, 12)):
            assert_as_whole(stages, model, case, case.make_batch(rows, length, rows))
    stages = split(model, 3, case.cuts, example=example, direct_skips=True)
    assert_as_whole(stages, model, case, case.make_batch(2, 7, 1))
    stages, cuts = finest(model, example)
    assert len(stages) == len(cuts) + 1 >= 5
    assert_as_whole(stages, model, case, case.make_batch(2, 5, 1))
    names = [name for module in stages.modules for name in module.state_dict()]
    assert {*names} == {*model.state_dict()}
