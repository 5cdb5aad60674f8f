"""A forward that will be recomputed keeps no activations, and its repetition is the same forward."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from rota.errors import PipelineError
from rota.models import Stages
from rota.runtime.gradients.forward_backward import forward
from rota.runtime.gradients.recompute import drawing_again, without_activations


class Statistics(nn.Module):
    """Two buffers that change and one that does not; the output depends on one that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("last", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("mask", torch.ones(3, dtype=torch.float64))
        self.layer = nn.Linear(3, 3).double()
        self.hidden: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.last = x.detach().mean(0)
        hidden = torch.tanh(self.layer(x))
        self.hidden.append(StorageWeakRef(hidden.untyped_storage()))
        return torch.sigmoid(hidden * self.mask * self.steps)


def test_nothing_but_inputs_is_kept_and_buffers_are_updated_once() -> None:
    torch.manual_seed(0)
    stages, x = Stages([Statistics()], inputs=[()]), torch.randn(4, 3, dtype=torch.float64).requires_grad_()
    module: Any = stages[0]
    for step in range(3):
        module.zero_grad()
        with without_activations(module, [x], (), "stage 0") as again:
            first, _, kept = forward(stages, 0, [x], ())
        assert module.hidden[-1].expired()
        assert first.requires_grad
        assert {*again.buffers} == ({"steps", "last"} if step == 0 else {"steps"})
        del kept
        module.steps += 10  # as other micro-batches do meanwhile
        second = forward(stages, 0, again.received, (), buffers=again.buffers)[0]
        assert torch.equal(first, second)
        assert not module.hidden[-1].expired()
        assert module.steps == (step + 1) * 11
        assert torch.equal(module.last, x.detach().mean(0))
        torch.autograd.backward(second.sum())
        assert module.layer.weight.grad is not None


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
