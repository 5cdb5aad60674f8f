"""What a trace could not say the same way, split refuses: with the line, the reason and a way out."""

from __future__ import annotations

import builtins
import gc
import random
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
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
        self.generator = torch.Generator()
        self.python_generator, self.numpy_state = random.Random(1), np.random.RandomState(1)
        self.numpy_generator = np.random.default_rng(1)

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


def drops_layers(model: Model, x: Tensor) -> Tensor:
    if torch.rand([]).item() < 0.5:
        return x
    return x.tanh()


def drops_layers_by_python(model: Model, x: Tensor) -> Tensor:
    skipped = random.random() < 0.5
    return x if skipped else x.tanh()


def drops_layers_by_numpy(model: Model, x: Tensor) -> Tensor:
    return x if np.random.rand() < 0.5 else x.tanh()


def drops_layers_by_its_own(model: Model, x: Tensor) -> Tensor:
    generators = (model.python_generator, model.numpy_state, model.numpy_generator)
    return x if any(generator.random() < 0.5 for generator in generators) else x.tanh()


def draws_by_its_own(model: Model, x: Tensor) -> Tensor:
    return x * int(torch.randint(2, (), generator=model.generator))


def seeds(model: Model, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return x + 1


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
        (invents, "return x + torch.randn", "forward of Model draws random numbers, or seeds them, at"),
        (drops_layers, "if torch.rand", "forward of Model draws random numbers, or seeds them, at"),
        (drops_layers_by_python, "skipped = random.random()", "forward of Model draws random numbers"),
        (drops_layers_by_numpy, "return x if np.random.rand()", "forward of Model draws random numbers"),
        (drops_layers_by_its_own, "return x if any", "forward of Model draws random numbers"),
        (draws_by_its_own, "return x * int", "forward of Model draws random numbers"),
        (seeds, "torch.manual_seed(0)", "forward of Model draws random numbers, or seeds them"),
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
        assert re.search(rf"test_tracing\.py:\d+ \({re.escape(line)}", message)
    assert model.training
    assert set(vars(model)) == set(vars(Model(middle)))
    assert torch.equal(model.count, torch.zeros(2))


def test_a_callback_of_the_garbage_collector_is_not_taken_for_the_line_that_draws() -> None:
    def interrupted(model: Any, x: Tensor) -> Tensor:
        _ = [*map(list, [()] * 100_000)], torch.manual_seed(0)  # enough new objects for a collection
        return x

    def collected(phase: str, info: dict[str, int]) -> None:
        del phase, info

    gc.callbacks.append(collected)
    try:
        with pytest.raises(SplitError, match=r"test_tracing\.py:\d+ \(_ = "):
            split(Model(interrupted), 2)
    finally:
        gc.callbacks.remove(collected)


@pytest.mark.parametrize(
    "middle",
    [drops_layers, drops_layers_by_python, drops_layers_by_numpy, drops_layers_by_its_own, draws_by_its_own, seeds],
)
def test_random_states_are_left_as_they_were(middle: Callable[[Any, Any], Any]) -> None:
    model = Model(middle)

    def draw() -> list[float]:
        its_own = (model.python_generator, model.numpy_state, model.numpy_generator)
        drawn = (torch.rand(()), random.random(), np.random.rand(), torch.rand((), generator=model.generator))
        return [float(number) for number in (*drawn, *(generator.random() for generator in its_own))]

    states = torch.get_rng_state(), random.getstate(), np.random.get_state(), model.generator.get_state()
    expected = draw()
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    model.generator.set_state(states[3])
    model.python_generator, model.numpy_state = random.Random(1), np.random.RandomState(1)
    model.numpy_generator = np.random.default_rng(1)
    tracing = sys.gettrace()
    with pytest.raises(SplitError, match="draws random numbers"):
        split(model, 2)
    assert draw() == expected
    assert sys.gettrace() is tracing


def test_what_draws_when_a_stage_runs_is_no_matter() -> None:
    class Drops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (random.random() + torch.rand(()))

    model = Model(lambda model, x: model.drops(F.relu(x) + torch.rand(x.shape)))
    model.drops = nn.Sequential(nn.Dropout(0.5), Drops())
    state, of_torch = random.getstate(), torch.get_rng_state()
    stages = split(model, 2)
    assert random.getstate() == state
    assert torch.equal(torch.get_rng_state(), of_torch)
    x = torch.randn(3, 2)
    assert not torch.equal(stages.run(x), stages.run(x))


# --- several threads --------------------------------------------------------------------------------------------------


def test_threads_split_one_after_another() -> None:
    """fx patches nn.Module for all threads, and we `isinstance`; here they meet within the forward of the first."""
    patched = builtins.isinstance, nn.Module.__call__, nn.Module.__getattr__
    inside = threading.Event()
    num_inside, most_inside = 0, []

    def meets(model: Model, x: Tensor) -> Tensor:
        nonlocal num_inside
        num_inside += 1
        most_inside.append(num_inside)
        inside.set()
        time.sleep(0.05)  # for the others to come in, if they can
        num_inside -= 1
        return x + 1

    made: list[Any] = []
    models = [Model(meets) for _ in range(3)]
    threads = [threading.Thread(target=lambda model=model: made.append(split(model, 2))) for model in models]
    for thread in threads:
        thread.start()
        inside.wait()
    for thread in threads:
        thread.join()
    assert (builtins.isinstance, nn.Module.__call__, nn.Module.__getattr__) == patched
    assert [len(stages) for stages in made] == [2, 2, 2]
    assert {*most_inside} == {1}


def test_another_thread_draws_meanwhile() -> None:
    drawn: list[float] = []

    def meets(model: Model, x: Tensor) -> Tensor:
        if not drawn:
            thread = threading.Thread(target=lambda: drawn.append(random.random()))
            thread.start()
            thread.join()
        return x + 1

    assert len(split(Model(meets), 2)) == 2
    assert random.random() != drawn[0]


def test_another_thread_runs_a_model_meanwhile() -> None:
    other, x = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), torch.randn(4, 2)
    expected, found = other(x), []

    def meets(model: Model, x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: found.append(other(given)))
        thread.start()
        thread.join()
        return x + 1

    given = x
    stages = split(Model(meets), 2)
    assert len(found) == 2  # traced for training and for evaluation
    assert all(torch.equal(one, expected) for one in found)
    assert "BatchNorm" not in str(stages.modules)


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
    with pytest.raises(SplitError, match=r"CutPoint cuts\[0\] is called twice, again at .*test_tracing.py:\d+"):
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
