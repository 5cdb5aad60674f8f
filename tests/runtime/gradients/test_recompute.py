"""The repetition of a forward draws the same numbers; a stage that differentiates inside is not repeated."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rota.errors import PipelineError
from rota.models import Stages
from rota.runtime.gradients.forward_backward import forward
from rota.runtime.gradients.recompute import drawing_again, without_activations


def test_differentiating_inside_is_refused() -> None:
    class Force(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.autograd.grad((x**3).sum(), x, create_graph=True)[0]

    stages, x = Stages([Force()], inputs=[()]), torch.ones(2, requires_grad=True)
    with (
        pytest.raises(PipelineError, match="differentiates inside its forward; plan without recomputation"),
        without_activations(stages[0], [x], (), "stage 0"),
    ):
        forward(stages, 0, [x], ())


class DropsLayers(nn.Module):
    """By Python's, NumPy's and its own generators; PyTorch's is seeded by whoever runs a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3).double() for _ in range(12))
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            drawn = (random.random, np.random.rand, lambda: torch.rand((), generator=self.generator).item())[i % 3]()
            if drawn < 0.5:
                x = layer(x)
        return x


def test_what_was_drawn_is_drawn_again() -> None:
    torch.manual_seed(0)
    module, x = DropsLayers(), torch.randn(4, 3, dtype=torch.float64).requires_grad_()
    stages = Stages([module], inputs=[()])
    for _ in range(5):
        with without_activations(module, [x], (), "stage 0") as again:
            first, _, _ = forward(stages, 0, [x], ())
        forward(stages, 0, [x], ())  # another micro-batch draws meanwhile
        now = random.getstate(), module.generator.get_state()
        with drawing_again(module, again):
            second, _, _ = forward(stages, 0, again.received, ())
        assert torch.equal(first, second)
        assert random.getstate() == now[0]
        assert torch.equal(module.generator.get_state(), now[1])
