"""What a trace could not say the same way, split refuses: with the line, the reason and a way out."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rota.errors import SplitError
from rota.models import CutPoint, split

WAY_OUT = r".*sub-module without CutPoints.*Stages\(modules, edges=\.\.\.\)"


class Model(nn.Module):
    """Two layers and two cut points around a function of the test's own."""

    def __init__(self, middle: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)
        self.cuts = [CutPoint() for _ in range(2)]
        self.middle = middle
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.cuts[0](self.first(x))
        return self.last(self.cuts[1](self.middle(self, x)))


def branches(model: Model, x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 0 else x


def iterates(model: Model, x: Tensor) -> Tensor:
    return sum(row for row in x)  # type: ignore[return-value]


def measures(model: Model, x: Tensor) -> Tensor:
    return x * len(x)


def asks(model: Model, x: Tensor) -> Tensor:
    return x + 1 if isinstance(x, Tensor) else x


def asks_torch(model: Model, x: Tensor) -> Tensor:
    return x + 1 if torch.is_tensor(x) else x


def drops(model: Model, x: Tensor) -> Tensor:
    return F.dropout(x, 0.5, model.training)


def skips(model: Model, x: Tensor) -> Tensor:
    return x.tanh() if model.training else x


def invents(model: Model, x: Tensor) -> Tensor:
    return x + torch.randn(2)


def freezes(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 2


def lowers(model: Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        return x @ x


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2.0 * gradients[0]


def applies(model: Model, x: Tensor) -> Tensor:
    return Double.apply(x)


def keeps(model: Model, x: Tensor) -> Tensor:
    model.seen = x
    return x


def counts(model: Model, x: Tensor) -> Tensor:
    model.count = model.count + 1
    return x


@pytest.mark.parametrize(
    ("middle", "line", "reason"),
    [
        (branches, "return x + 1 if", "TraceError: symbolically traced variables cannot be used as inputs to control"),
        (iterates, "return sum", "TraceError: Proxy object cannot be iterated"),
        (measures, "return x * len", "RuntimeError: 'len' is not supported"),
        (asks, "return x + 1 if isinstance", "TypeError: isinstance of a value whose type the trace does not know"),
        (asks_torch, "return x + 1 if torch.is", "TraceError: symbolically traced variables"),
        (drops, "return F.dropout", "'dropout' at .* differs between training and evaluation"),
        (skips, "return x.tanh", "'tanh' at .* differs between training and evaluation"),
        (invents, "", "'_tensor_constant0' at .* differs between training and evaluation, or from one call"),
        (freezes, "return x * 2", "'mul' at .* runs in a context"),
        (lowers, "return x @ x", "'matmul' at .* runs in a context"),
        (
            applies,
            "return x * 2.0",
            r"'mul' at .* is inside the torch.autograd.Function Double, whose backward a trace",
        ),
        (keeps, "", "forward of Model sets seen, which a stage would not"),
        (counts, "", "forward of Model sets count, which a stage would not"),
    ],
)
def test_forward_that_a_trace_cannot_tell(middle: Callable[[Any, Any], Any], line: str, reason: str) -> None:
    model = Model(middle)
    with pytest.raises(SplitError, match=reason) as raised:
        split(model, 2)
    message = str(raised.value)
    assert re.search(WAY_OUT, message)
    if line:
        assert re.search(rf"test_models_tracing\.py:\d+ \({re.escape(line)}", message)
    assert model.training
    assert set(vars(model)) == set(vars(Model(middle)))
    assert torch.equal(model.count, torch.zeros(2))


def test_a_function_with_a_backward_of_its_own_is_refused_where_no_gradients_are_made_either() -> None:
    with torch.no_grad(), pytest.raises(SplitError, match=r"inside the torch\.autograd\.Function Double"):
        split(Model(applies), 2)


def test_model_is_left_as_it_was() -> None:
    model = Model(lambda model, x: x + torch.tensor([1.0, 2.0]))
    model.last.eval()
    before = [dict(vars(module)) for module in model.modules()]
    split(model, 2)
    assert [vars(module) for module in model.modules()] == before


def test_cut_point_called_twice() -> None:
    model = Model(lambda model, x: model.cuts[0](x))
    with pytest.raises(SplitError, match=r"CutPoint cuts\[0\] is called twice, again at .*test_models_tracing.py:\d+"):
        split(model, 2)


def test_cut_points_that_are_not_called_do_not_count() -> None:
    class Early(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.cuts[1](self.first(x)))

    with pytest.raises(SplitError, match=r"there are 1 possible .*forward calls: 0 \(cuts\[1\]\)"):
        split(Early(branches), 3)


def test_cut_point_that_no_attribute_holds_goes_by_its_call() -> None:
    class Nameless(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(CutPoint()(self.cuts[0](self.first(x))))

    model, x = Nameless(branches), torch.randn(3, 2)
    assert torch.equal(split(model, 2, cuts=["call 1"]).run(x), model(x))


def test_stage_whose_work_is_not_used() -> None:
    model = Model(lambda model, x: torch.ones_like(x))
    assert len(split(model, 3)) == 3

    class Forgetful(Model):
        def forward(self, x: Tensor) -> Tensor:
            self.cuts[0](self.first(x))
            return self.last(x)

    with pytest.raises(SplitError, match=r"nothing that stage 0 makes before CutPoint cuts\[0\] is used after it"):
        split(Forgetful(branches), 2)


def test_change_in_place_of_what_stages_share() -> None:
    model = Model(lambda model, x: x.mul_(2))
    with pytest.raises(SplitError, match=r"'mul_' at .* in place that stages \[0, 1\] share.*make a new value"):
        split(model, 3)
    with pytest.raises(SplitError, match=r"'relu' at .* changes a value in place"):
        split(Model(lambda model, x: F.relu(x, inplace=True)), 3)
    x = torch.randn(3, 2)
    assert torch.equal(split(model, 2, cuts=[1]).run(x), model(x))


@pytest.mark.parametrize("num_stages", [1, 2])
def test_arguments_that_stages_cannot_pass(num_stages: int) -> None:
    class Star(Model):
        def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
            return x

    class Stars(Model):
        def forward(self, x: Tensor, **rest: Tensor) -> Tensor:
            return x

    class Keyword(Model):
        def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
            return x

    for kind, name in ((Star, "rest"), (Stars, "rest"), (Keyword, "mask")):
        with pytest.raises(SplitError, match=rf"forward of {kind.__name__} takes '{name}.*give the forward plain"):
            split(kind(branches), num_stages)


def test_hooks_and_forward_of_the_model_object() -> None:
    model = Model(lambda model, x: x)
    hook = model.register_forward_hook(lambda *_: None)
    with pytest.raises(SplitError, match="this Model has hooks or a forward of its own, which no stage would run"):
        split(model, 2)
    hook.remove()
    assert len(split(model, 2)) == 2
    model.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(SplitError, match="this Model has hooks or a forward of its own"):
        split(model, 2)
