"""Where PyTorch's split of a backward into I and W is no good, TorchEngine does it whole, in the place of either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rota import Cluster, Costs, Plan, Stages, place
from rota.interop import TorchEngine
from rota.schedules import NAMED
from support.engine_runs import SPLIT, assert_right, wrong_alone
from support.networks import Layer, batch_of, chain, loss_fn
from support.pool import Pool

pytestmark = pytest.mark.dist


def zero_bubble(num_stages: int) -> Plan:
    placement = place(Costs.uniform(num_stages, 1, 1, 1), Cluster.uniform(num_stages))
    return NAMED["zb_h1"](placement, 4)


class Double(torch.autograd.Function):
    """Counts its backwards."""

    backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Double.backwards += 1
        return 2 * gradient


class Odd(nn.Module):
    """Two layers, put together in odd ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how = Layer().double(), Layer().double(), how

    def forward(self, x: Tensor) -> Any:
        a, b = self.a, self.b
        match self.how:
            case "one weight at three places, another between":
                return a(b(a(b(a(x)))))
            case "a view":
                return b(a(x)).view(-1).view(x.shape)
            case "an expanded gradient":
                return x.sum(1, keepdim=True) * a.linear.bias
            case "an output that needs no input":
                return a(x), b(torch.ones_like(x))
            case "a function of its own":
                return a(Double.apply(b(x)))
            case "checkpoints":
                return checkpoint(b, checkpoint(a, x, use_reentrant=False), use_reentrant=False)
            case "reentrant checkpoints":
                return checkpoint(b, checkpoint(a, x, use_reentrant=True), use_reentrant=True)
            case "what it received":
                return x, a(x)
        raise AssertionError(self.how)


class Sum(nn.Module):
    """Sums the tensors of what it receives, then a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer().double()

    def forward(self, values: Any) -> Tensor:
        result: Tensor = self.layer(sum(values) if isinstance(values, tuple) else values)
        return result


def odd(how: str) -> Stages:
    torch.manual_seed(0)
    return Stages([Layer().double(), Odd(how), Sum()])


class MakeOdd:
    """Pickles, as a closure would not."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __call__(self) -> Stages:
        return odd(self.how)


@pytest.mark.parametrize(
    ("how", "backward_at"),
    [
        ("one weight at three places, another between", "I"),
        ("a view", "I"),
        ("an expanded gradient", "I and W"),
        ("an output that needs no input", "I"),
        ("a function of its own", "I"),
        ("checkpoints", "I and W"),
        ("reentrant checkpoints", "I"),
        ("what it received", "I and W"),
    ],
)
def test_split_backwards(pool: Pool, how: str, backward_at: str) -> None:
    plan = zero_bubble(3)
    assert_right(pool, MakeOdd(how), plan)
    by_rank = pool.run(3, told, MakeOdd(how), plan)
    assert by_rank == [({0: "W"}, 0), ({1: backward_at}, 4 * (how == "a function of its own")), ({2: "I and W"}, 0)]


def told(rank: int, make: Callable[[], Stages], plan: Plan) -> tuple[dict[int, str], int]:
    Double.backwards = 0
    with TorchEngine(make(), plan, loss_fn) as engine:
        engine.step(*batch_of(4))
        return engine.backward_at, Double.backwards


def frozen_first() -> Stages:
    stages = chain(3)
    stages[0].requires_grad_(False)
    return stages


def frozen_middle() -> Stages:
    stages = chain(3)
    stages[1].requires_grad_(False)
    return stages


def frozen_last() -> Stages:
    stages = chain(3)
    stages[1].requires_grad_(False)
    stages[2].requires_grad_(False)
    return stages


def all_but_the_last_frozen() -> Stages:
    stages = chain(3)
    stages[0].requires_grad_(False)
    stages[1].requires_grad_(False)
    stages[2].linear.bias.requires_grad_(False)
    return stages


def test_split_backwards_behind_frozen_stages(pool: Pool) -> None:
    wrong = {"1.linear.weight", "1.linear.bias", "2.linear.weight", "2.linear.bias"}
    assert (
        {"1.linear.weight", "1.linear.bias"} <= wrong_alone(pool, frozen_first, zero_bubble(3), [batch_of(4)]) <= wrong
    )
    for make in (frozen_first, frozen_middle, frozen_last, all_but_the_last_frozen):
        assert_right(pool, make, zero_bubble(3))
        assert_right(pool, make, NAMED["1f1b"](place(Costs.uniform(3), Cluster.uniform(3)), 4))


def with_hook(rank: int, plan: Plan) -> int:
    """How many gradients a hook saw that an optimizer in the backward would hang on."""
    stages, seen = chain(2), []
    stages[1].linear.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(1))
    with TorchEngine(stages, plan, loss_fn) as engine:
        engine.step(*batch_of(2))
    return len(seen)


def test_hooks_of_weights_see_split_backwards(pool: Pool) -> None:
    assert pool.run(2, with_hook, SPLIT)[1] == 2
