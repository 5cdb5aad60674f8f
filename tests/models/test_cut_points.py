"""CutPoints anywhere in a forward: what runs between them computes as in the model, or the split says why it cannot."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rota import CutPoint, SplitError, split


class Model(nn.Module):
    """Two layers and two cut points around a function of the test's own."""

    def __init__(self, middle: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)
        self.cuts = [CutPoint() for _ in range(2)]
        self.middle = middle
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0]))
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        x = self.cuts[0](first)
        return self.last(self.cuts[1](self.middle(self, x))) + first


def branches(model: Model, x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 0 else x


def iterates(model: Model, x: Tensor) -> Tensor:
    return torch.stack([row * len(x) for row in x])


def freezes(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x * 2
    return x * model.scale + y


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2.0 * gradients[0]


def applies(model: Model, x: Tensor) -> Tensor:
    return Double.apply(model.act(x))


def changes_its_own(model: Model, x: Tensor) -> Tensor:
    y = model.act(x) * model.scale
    y += x
    return F.relu(y, inplace=True)


def lowers(model: Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ x.mT).to(x.dtype) @ x


@pytest.mark.parametrize("middle", [branches, iterates, freezes, applies, changes_its_own, lowers])
def test_any_python_between_cut_points(middle: Callable[[Any, Any], Any]) -> None:
    torch.manual_seed(1)
    model, x = Model(middle).double(), torch.randn(3, 2, dtype=torch.float64)
    whole = copy.deepcopy(model)
    expected = whole(x)
    expected.square().sum().backward()
    for direct_skips in (False, True):
        model.zero_grad()
        output = split(model, 3, example=(x,), direct_skips=direct_skips).run(x)
        output.square().sum().backward()
        assert torch.equal(output, expected)
        for name, parameter in whole.named_parameters():
            grad = model.get_parameter(name).grad
            torch.testing.assert_close(grad, parameter.grad, rtol=1e-12, atol=1e-12)


def test_cut_points_inside_a_block() -> None:
    class Block(nn.Module):
        """A residual around a cut; its own weight is read on both sides of another."""

        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(2, 4), nn.Linear(4, 2)
            self.gain = nn.Parameter(torch.rand(2))
            self.cut, self.after = CutPoint(), CutPoint()

        def forward(self, x: Tensor) -> Tensor:
            y = self.cut(torch.relu(self.up(x * self.gain)))
            return self.after(x + self.down(y)) * self.gain

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    model, x = Blocks().double(), torch.randn(3, 2, dtype=torch.float64)
    whole = copy.deepcopy(model)
    whole(x).sum().backward()
    stages = split(model, 5, example=(x,))
    assert stages.cuts == ("blocks.0.cut", "blocks.0.after", "blocks.1.cut", "blocks.1.after")
    assert [stage.holds for stage in stages][1:3] == [
        ("blocks.0.down",),
        ("blocks.0.gain", "blocks.1.gain", "blocks.1.up"),
    ]
    stages.run(x).sum().backward()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, rtol=1e-12, atol=1e-12)


def test_a_cut_point_that_is_called_again_is_another_cut() -> None:
    model, x = Model(lambda model, x: model.cuts[0](model.act(x))), torch.randn(3, 2)
    stages = split(model, 3, ["cuts[0]", "cuts[0]#2"], example=(x,))
    assert torch.equal(stages.run(x), model(x))


def test_cut_points_that_are_not_called_do_not_count() -> None:
    class Early(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.cuts[1](self.first(x)))

    with pytest.raises(SplitError, match=r"there are 1 possible .*forward calls: 0 \(cuts\[1\]\)"):
        split(Early(branches), 3, example=(torch.randn(3, 2),))


def test_stage_whose_work_is_not_used() -> None:
    class Forgetful(Model):
        def forward(self, x: Tensor) -> Tensor:
            self.cuts[0](self.first(x))
            return self.last(x)

    with pytest.raises(SplitError, match=r"nothing that stage 0 makes, before cuts\[0\], is used after it"):
        split(Forgetful(branches), 2, example=(torch.randn(3, 2),))


def test_change_in_place_of_what_stages_share() -> None:
    """`first`, which is read at the end, is the same tensor as what the cut point returns."""
    for middle in (lambda model, x: x.mul_(2), lambda model, x: F.relu(x, inplace=True)):
        model, x = Model(middle), torch.randn(3, 2)
        with pytest.raises(SplitError, match=r"CutPoint cuts\[0\] is given is read after it too.*changed in place"):
            split(model, 3, example=(x,))
        assert torch.equal(split(model, 2, cuts=[1], example=(x,)).run(x), model(x))
