"""Random numbers that forwards draw: those that decide nothing are no obstacle, others are shared or refused."""

import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rota import SplitError, split

from .test_behaviour import WIDTH, Blocks, rows, same


class Dropping(Blocks):
    """Skips layers at random, as `draw` says."""

    def __init__(self, draw: Any, layerdrop: float) -> None:
        super().__init__()
        self.draw, self.layerdrop = draw, layerdrop

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        for layer in self.layers:
            probability = self.draw()
            if self.training and probability < self.layerdrop:
                continue
            x = layer(x)
        return x


DRAWS = {
    "random.uniform": lambda: random.uniform(0, 1),
    "random.random": lambda: random.random(),
    "numpy.random": lambda: np.random.random(),
    "numpy.uniform": lambda: np.random.uniform(0, 1),
    "numpy.rand": lambda: np.random.rand(),
    "torch.rand": lambda: torch.rand([]),
}


@pytest.mark.parametrize("how", DRAWS)
def test_layer_drop_of_zero_is_no_obstacle(how: str) -> None:
    model = Dropping(DRAWS[how], 0.0)
    stages = split(model, 3, example={"x": rows()})
    same(model, stages, {"x": rows(5)})
    states = random.getstate(), np.random.get_state()[1].tolist()
    stages.run({"x": rows()})
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states


@pytest.mark.parametrize("how", DRAWS)
@pytest.mark.parametrize("cut", ["layers.2", "layers.1"])
def test_layer_drop_is_refused_wherever_the_cut_is(how: str, cut: str) -> None:
    told = r"random numbers.* at .*test_draws.py:\d+ \(if self.training and .*set layerdrop \(0.5\) to 0.0"
    with pytest.raises(SplitError, match=told):
        split(Dropping(DRAWS[how], 0.5), 2, [cut], example={"x": rows()})


def test_layer_drop_that_only_the_last_stage_draws_is_refused() -> None:
    class DroppingAtTheEnd(Dropping):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            x = self.layers[1](self.layers[0](x))
            if torch.rand([]) >= self.layerdrop:
                x = self.layers[2](x)
            return self.layers[3](x)

    told = r"decides by random numbers at .*\(if torch.rand.* layerdrop \(0.001\) to 0.0.* \(drawn by rand at "
    with pytest.raises(SplitError, match=told):
        split(DroppingAtTheEnd(None, 0.001), 2, ["layers.1"], example={"x": rows()})


def test_a_number_of_python_that_a_forward_computes_with_is_refused() -> None:
    for between in (
        lambda _, x: x * random.random(),
        lambda _, x: x + torch.full((WIDTH,), np.random.uniform(-1, 1)),
        lambda _, x: x * float(random.uniform(0, 1)),
        lambda _, x: x + random.gauss(0, 1),
        lambda _, x: x * torch.as_tensor(np.random.choice(3)),
    ):
        told = r"forward of Blocks uses Python's or NumPy's random numbers.* at .*test_draws.py:\d+ \(lambda _, x: x"
        with pytest.raises(SplitError, match=told):
            split(Blocks(between), 2, example={"x": rows()})


class Masking(Blocks):
    """Masks positions by NumPy, in a function of the file."""

    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"mask_time_prob": 0.25, "layer_norm_eps": 1e-5})()

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if self.config.mask_time_prob > 0:
            x = x * torch.as_tensor(_mask(len(x), self.config.mask_time_prob, self.config.layer_norm_eps))
        return super().forward(x)


def _mask(length: int, probability: float, _: float) -> Any:
    draws = np.random.rand(length, 1)
    return (draws > probability).astype("float32")


def test_a_mask_of_numpy_is_refused_with_its_line_and_its_rate() -> None:
    model = Masking()
    line = re.escape("(draws = np.random.rand(length, 1))")
    told = rf"test_draws.py:\d+ {line}, and each .* set config.mask_time_prob \(0.25\) to 0.0, which that code reads"
    with pytest.raises(SplitError, match=told):
        split(model, 2, example={"x": rows()})
    model.config.mask_time_prob = 0.0
    same(model, split(model, 2, example={"x": rows()}), {"x": rows()})


class Jitter(nn.Module):
    """A module without weights that draws, as DINOv3's rotary positions do."""

    def forward(self, length: int) -> Tensor:
        return torch.ones(length, 1).uniform_(0.5, 1.5)


class Jittering(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.jitter = Jitter()

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        jitter = self.jitter(len(x))
        for layer in self.layers:
            x = layer(x) * jitter
        return x


def test_what_a_module_without_weights_draws_is_shared_by_the_stages() -> None:
    model = Jittering()
    stages = split(model, 3, example={"x": rows()})
    outputs = []
    for run in (lambda: model(x=rows(5)), lambda: stages.run({"x": rows(5)})):
        torch.manual_seed(1)
        outputs.append(run())
    assert torch.equal(*outputs)


def test_a_draw_after_the_last_module_may_decide() -> None:
    class Sampling(Blocks):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            x = super().forward(x)
            if torch.rand([]) < 0.5:
                x = x * 1
            return x

    model = Sampling()
    same(model, split(model, 2, example={"x": rows()}), {"x": rows()})
