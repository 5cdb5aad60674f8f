"""Where `how_to_split` trusts PyTorch's split of a backward it is right, and where it does not there is a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.pipelining")

from torch import Tensor, nn  # noqa: E402
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight  # noqa: E402

from rota.interop.torch_backward import how_to_split  # noqa: E402

IS_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
pytestmark = pytest.mark.skipif(IS_OLD, reason="PyTorch's engine can be used from 2.13 on")


class Stage(nn.Module):
    """Three layers, put together by a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(4, 4).double() for _ in range(3))
        self.function = function

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        output = self.function(self, x)
        return output if isinstance(output, tuple) else (output,)


def made(stage: Stage, wants_gradient: bool) -> tuple[Tensor, tuple[Tensor, ...], list[Tensor | None]]:
    torch.manual_seed(1)
    x = torch.randn(3, 4, dtype=torch.float64).requires_grad_(wants_gradient)
    outputs = stage(x)
    return x, outputs, [torch.randn_like(output) if output.requires_grad else None for output in outputs]


def whole(stage: Stage, wants_gradient: bool) -> list[Tensor | None]:
    x, outputs, gradients = made(stage, wants_gradient)
    roots = [(output, gradient) for output, gradient in zip(outputs, gradients, strict=True) if output.requires_grad]
    torch.autograd.backward(*map(list, zip(*roots, strict=True)))
    return collected(stage, x)


def split(stage: Stage, wants_gradient: bool) -> list[Tensor | None]:
    x, outputs, gradients = made(stage, wants_gradient)
    _, groups = stage_backward_input([*outputs], gradients, [x], stage.parameters())
    stage_backward_weight(stage.parameters(), groups)
    return collected(stage, x)


def collected(stage: Stage, x: Tensor) -> list[Tensor | None]:
    gradients = [tensor.grad for tensor in (x, *stage.parameters())]
    stage.zero_grad()
    return gradients


TRUSTED = {
    "a chain": lambda s, x: s.b(torch.tanh(s.a(x))),
    "a residual": lambda s, x: x + s.b(torch.tanh(s.a(x))),
    "two outputs": lambda s, x: (s.a(x), s.b(torch.tanh(s.c(x)))),
    "outputs that share layers": lambda s, x: (lambda y: (s.b(y), s.c(y)))(torch.tanh(s.a(x))),
    "an output of integers": lambda s, x: (s.a(x), (x > 0).long()),
    "weights of weights": lambda s, x: x @ (s.a.weight @ s.b.weight) + s.c(x),
    "a detached input": lambda s, x: s.a(x.detach()) + s.b(x),
    "a layer that reads no input": lambda s, x: s.a(x) * s.b(torch.ones(3, 4, dtype=torch.float64)),
    "unused layers": lambda s, x: s.a(x),
}


@pytest.mark.parametrize("name", TRUSTED)
def test_what_is_trusted_is_right(name: str) -> None:
    stage = Stage(TRUSTED[name])
    x, outputs, _ = made(stage, True)
    assert how_to_split([x], outputs, stage) == "I and W"
    torch.testing.assert_close(split(stage, True), whole(stage, True), rtol=1e-10, atol=1e-10)


DISTRUSTED = {
    "a weight at three places": lambda s, x: s.a(torch.tanh(s.b(torch.tanh(s.a(torch.tanh(s.b(torch.tanh(s.a(x))))))))),
    "a view": lambda s, x: s.a(x).view(4, 3),
    "an output that needs no input": lambda s, x: (s.a(x), s.b(torch.ones(3, 4, dtype=torch.float64))),
}


@pytest.mark.parametrize("name", DISTRUSTED)
def test_what_is_not_trusted_goes_wrong(name: str) -> None:
    stage = Stage(DISTRUSTED[name])
    x, outputs, _ = made(stage, True)
    assert how_to_split([x], outputs, stage) == "I"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.testing.assert_close(split(stage, True), whole(stage, True))


def test_an_input_that_needs_no_gradient_loses_all() -> None:
    stage = Stage(TRUSTED["a chain"])
    x, outputs, _ = made(stage, False)
    assert how_to_split([x], outputs, stage) == "W"
    assert split(stage, False) == [None] * 7
    assert sum(gradient is not None for gradient in whole(stage, False)) == 4


def test_hooks_after_accumulation_are_passed_by() -> None:
    stage, seen = Stage(TRUSTED["a chain"]), []
    stage.a.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter))
    x, outputs, _ = made(stage, True)
    assert how_to_split([x], outputs, stage) == "I"
    split(stage, True)
    assert not seen
