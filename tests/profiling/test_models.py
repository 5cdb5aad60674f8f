"""Profiling runs stages of all sorts, also real models' blocks, and a storage watch changes none of their gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rota import Stages
from rota.profiling.peak_memory import StorageWatch
from rota.runtime.gradients.forward_backward import StageForward, backward_inputs
from support.odd_stages import ROWS, STAGES, WIDTH
from support.profiles import profile, profile_layers

LENGTH, HIDDEN = 5, 8


def sum_of(output: Any, target: Any) -> Tensor:
    del target
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first.sum()


# What torch.compile made is not run under a dispatch mode; a stage may differentiate within unless it is recomputed.
WATCHED = [name for name in STAGES if "compiled" not in name]


@pytest.mark.parametrize("name", WATCHED)
def test_stages_of_all_sorts(name: str) -> None:
    torch.manual_seed(3)
    stages = Stages([nn.Linear(WIDTH, WIDTH).double(), STAGES[name]().double()])
    batch = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    in_place = name.startswith("in place at once")  # a recomputed stage must not write into what it receives
    differentiates = name == "gradient of its own"
    for recompute in ((),) if in_place or differentiates else ((), (1,)):
        costs = profile(stages, batch, None, sum_of, split_backward=True, recompute=recompute, repeats=1, here=True)
        assert costs.num_stages == 2
    assert profile_layers(stages, batch, None, sum_of, repeats=1).num_layers == 2


def test_a_storage_watch_changes_no_gradient() -> None:
    torch.manual_seed(3)
    module = STAGES["numbers"]().double()
    x, gradient = torch.randn(2, ROWS, WIDTH, dtype=torch.float64).unbind()
    x.requires_grad_()
    module(x).backward(gradient)
    expected = [x.grad, *(parameter.grad for parameter in module.parameters())]
    module.zero_grad(set_to_none=True)
    with StorageWatch():
        _, _, kept = StageForward(Stages([nn.Identity(), module, nn.Identity()]), 1, split=True)([x], None)
        (of_inputs,), work = backward_inputs(kept, [[gradient]])
        work.run()
    found = [*of_inputs, *(parameter.grad for parameter in module.parameters())]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
