"""What forwards ask about modules and values of other stages, and what of it is refused when the model is split."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rota import PipelineError, SplitError, Stages, split
from rota.models import finest

from .test_behaviour import WIDTH, Blocks, rows, same


def gradients_as_whole(model: nn.Module, stages: Stages, batch: dict[str, Any]) -> None:
    """The stages' output and gradients are those of the model."""
    same(model, stages, batch)
    expected, gradients = [], []
    for run, into in ((model, expected), (lambda **given: stages.run(given), gradients)):
        model.zero_grad()
        run(**batch).square().sum().backward()
        into += [None if each.grad is None else each.grad.clone() for each in model.parameters()]
    for one, other in zip(expected, gradients, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, rtol=0, atol=1e-6)


class Tower(nn.Module):
    """Layers of which the forward asks for the type and the place, as vision towers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in range(2))
        self.register_buffer("offset", torch.ones(1, dtype=torch.float64))

    dtype = property(lambda self: next(self.parameters()).dtype)
    device = property(lambda self: next(self.buffers()).device)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + self.offset
        return x


class Seeing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = Tower(), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.tower(x.to(self.tower.dtype).to(self.tower.device))
        y = x.to(next(self.head.parameters()).dtype) + sum(1 for _ in self.parameters())
        if not any(weight.requires_grad for weight in self.tower.parameters()):
            y = y.detach()
        for layer in self.head:
            y = layer(y)
        return y.to(next(self.parameters()).dtype) * x.sum()


@pytest.mark.parametrize("cut", ["tower.layers.1", "head.0", "head.1"])
def test_modules_of_other_stages_tell_dtypes_and_devices_of_their_weights(cut: str) -> None:
    model = Seeing()
    stages = split(model, 2, [cut], example={"x": rows()})
    gradients_as_whole(model, stages, {"x": rows(5)})
    same(model, copy.deepcopy(stages), {"x": rows()})
    same(model, pickle.loads(pickle.dumps(stages)), {"x": rows()})
    assert {name for name, _ in stages[1].named_parameters()} < {name for name, _ in model.named_parameters()}
    assert all(type(weight) is nn.Parameter for stage in stages.modules for weight in stage.parameters())


def test_weights_of_other_stages_are_where_the_stage_is_and_not_on_meta() -> None:
    torch.manual_seed(0)
    model = Seeing()
    with torch.device("meta"):
        stages = split(Seeing(), 2, ["head.1"], example={"x": rows()})
    for stage in stages.modules:
        names = {name for name, _ in [*stage.named_parameters(), *stage.named_buffers()]}
        stage.load_state_dict({n: t for n, t in model.state_dict().items() if n in names}, assign=True)
    same(model, stages, {"x": rows()})


READ: dict[str, Callable[[Tensor], int]] = {
    "tolist": lambda sizes: sizes.tolist()[1],
    "int": lambda sizes: int(sizes[1]),
    "iteration": lambda sizes: sum(int(size) for size in sizes),
    "length": lambda sizes: len(sizes) + len(range(sizes[0])),
    "numpy": lambda sizes: int(sizes.numpy().max()),
    "asarray": lambda sizes: int(np.asarray(sizes).max()),
    "contains": lambda sizes: 3 in sizes,
    "nonzero": lambda sizes: len(sizes.nonzero()),
    "unique": lambda sizes: len(sizes.unique()),
    "repeat_interleave": lambda sizes: len(sizes.repeat_interleave(sizes)),
}


class Sized(nn.Module):
    """`read` is what the forward, or its last layer, asks of an input."""

    def __init__(self, read: Callable[[Tensor], int], is_inside: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = _Last(read) if is_inside else None
        self.read = read

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.read(sizes) if self.last is None else self.last(x, sizes)


class _Last(nn.Linear):
    def __init__(self, read: Callable[[Tensor], int]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.read = read

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * self.read(sizes)


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("how", READ)
def test_an_input_whose_values_python_reads_reaches_the_stage(how: str, is_inside: bool) -> None:
    model = Sized(READ[how], is_inside)
    stages = split(model, 3, example={"x": rows(), "sizes": torch.tensor([2, 3])})
    same(model, stages, {"x": rows(), "sizes": torch.tensor([1, 3, 2])})


@pytest.mark.parametrize(
    "between",
    [lambda _, x: x * torch.ones_like(x).sum().item(), lambda _, x: x[torch.arange(len(x))]],
    ids=["made like it", "taken by whole numbers"],
)
def test_what_needs_only_the_shape_of_a_tensor_of_another_stage(between: Callable[[Any, Tensor], Tensor]) -> None:
    model = Blocks(between)
    stages = split(model, 2, ["layers.3"], example={"x": rows()})
    same(model, stages, {"x": rows(5)})
    assert [value.name for value in stages.carried] == ["layers.2"]


def test_values_that_the_example_did_not_read_are_told() -> None:
    model = Blocks(lambda _, x: x * len(x.tolist()) if len(x) > 4 else x)
    stages = split(model, 2, ["layers.3"], example={"x": rows()})
    with pytest.raises(PipelineError, match=r"values of a tensor of another stage are read at .*test_other_stages.py:"):
        stages.run({"x": rows(6)})


class Attention(nn.Module):
    """Returns what a Linear inside of it returns, and a tensor that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.project(x), bias, x.softmax(-1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.attention(x, bias)[0] + bias


class Collecting(nn.Module):
    """Hooks collect these outputs of the attentions and the projections."""

    def __init__(self, wanted: tuple[int, ...]) -> None:
        super().__init__()
        self.layers, self.seen = nn.ModuleList(Block() for _ in range(3)), []
        self.first = nn.Linear(WIDTH, WIDTH)
        for layer in self.layers:
            layer.attention.register_forward_hook(_Collect(self.seen, wanted))
            layer.attention.project.register_forward_hook(_Collect(self.seen, ()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.clear()
        bias = self.first(x)
        for layer in self.layers:
            x = layer(x, bias)
        return x + sum(each.square() for each in self.seen)


class _Collect:
    def __init__(self, seen: list[Tensor], wanted: tuple[int, ...]) -> None:
        self._seen, self._wanted = seen, wanted

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        self._seen += [output[number] for number in self._wanted] or [output]


@pytest.mark.parametrize("wanted", [(0,), (2,), (0, 1, 2)])
def test_hooks_take_what_modules_in_modules_and_arguments_give(wanted: tuple[int, ...]) -> None:
    model = Collecting(wanted)
    gradients_as_whole(model, split(model, 3, example={"x": rows()}), {"x": rows(5)})


class Checkpointed(Blocks):
    """Runs two layers per checkpoint."""

    reentrant = True

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        def run(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
            return torch.relu(second(torch.relu(first(x))))

        x = self.layers[0](x)
        return checkpoint(run, self.layers[1], self.layers[2], x, use_reentrant=self.reentrant) + self.layers[3](x)


@pytest.mark.parametrize("cut", ["layers.2", "layers.3"])
def test_a_cut_inside_an_autograd_function_is_refused(cut: str) -> None:
    told = r"reads what layers.\d returns inside the autograd function CheckpointFunction.*use_reentrant=False, or cut"
    model = Checkpointed()
    with pytest.raises(SplitError, match=told):
        split(model, 2, [cut], example={"x": rows()})
    gradients_as_whole(model, split(model, 2, ["layers.1"], example={"x": rows()}), {"x": rows()})
    model.reentrant = False
    stages = split(model, 2, [cut], example={"x": rows()})
    told = r"layers.\d \(Linear\) on stage 1, whose weights are on another stage, is called at .*as checkpoint does"
    with pytest.raises(PipelineError, match=told):
        stages.run({"x": rows()}).sum().backward()


def test_checkpoints_of_one_block_each() -> None:
    class EachCheckpointed(Blocks):
        reentrant = True

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            x = self.layers[0](x)
            for layer in self.layers[1:]:
                x = torch.relu(checkpoint(layer, x, use_reentrant=self.reentrant))
            return x

    model = EachCheckpointed()
    with pytest.raises(SplitError, match=r"reads what layers.1 returns inside the autograd function Checkpoint"):
        split(model, 3, example={"x": rows()})
    model.reentrant = False
    gradients_as_whole(model, split(model, 3, example={"x": rows()}), {"x": rows()})


def test_writes_into_what_is_computed_from_a_buffer() -> None:
    class Rotating(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inv_freq", torch.ones(WIDTH))
            self.target = None

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            angles = self.inv_freq * 2 if self.target is None else self.inv_freq
            angles[1:3] = self.inv_freq[0] * 3
            for layer in self.layers:
                x = layer(x * angles)
            return x

    model = Rotating()
    gradients_as_whole(model, split(model, 3, example={"x": rows()}), {"x": rows()})
    model.target = "the buffer itself"
    with pytest.raises(SplitError, match="the forward writes into inv_freq between modules"):
        split(model, 3, example={"x": rows()})


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_forward_that_holds_the_model_itself_is_refused(is_compiled: bool) -> None:
    model = Blocks()
    original = model.forward
    model.forward = torch.compile(original, backend="eager") if is_compiled else lambda *a, **k: original(*a, **k)
    told = "torch.compile of Blocks.forward" if is_compiled else r".*<lambda> at .*test_other_stages.py:\d+"
    with pytest.raises(SplitError, match=rf"model.forward \({told}.*calls a Linear of the model itself.*del model.fo"):
        split(model, 2, example={"x": rows()})
    del model.forward
    same(model, split(model, 2, example={"x": rows()}), {"x": rows()})


class Repeating(nn.Module):
    """Calls its only block five times, as ALBERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.groups, self.head = nn.ModuleList([nn.Linear(WIDTH, WIDTH)]), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5):
            x = torch.tanh(self.groups[0](x))
        return self.head(x)


def test_a_block_that_is_called_repeatedly_is_cut_between_its_calls() -> None:
    model, example = Repeating(), {"x": rows()}
    stages = split(model, 3, example=example)
    assert {*stages.cuts} < {f"groups.0#{call}" for call in range(2, 6)}
    gradients_as_whole(model, stages, {"x": rows(5)})
    by_name = split(model, 3, ["groups.0#3", "head"], example=example)
    assert by_name.cuts == ("groups.0#3", "head")
    gradients_as_whole(model, by_name, example)
    assert finest(model, example)[1] == tuple(f"groups.0#{call}" for call in range(2, 6))
    with pytest.raises(SplitError, match=r"cuts has 'groups.0#7'.* Possible cuts are: .*groups.0#5"):
        split(model, 2, ["groups.0#7"], example=example)


def test_lists_of_blocks_that_this_forward_does_not_call_are_named() -> None:
    class Skipping(Blocks):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return x

    with pytest.raises(SplitError, match=r"calls no modules in its lists of blocks \(layers.0, …\) with this example"):
        split(Skipping(), 2, example={"x": rows()})


class Compiled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo of PyTorch 2.15 looks at it
@pytest.mark.parametrize("is_before", [False, True])
def test_modules_are_compiled_before_the_split_or_by_their_stage(is_before: bool) -> None:
    model, compiled = Blocks(layer=Compiled), []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        compiled.append(inputs)
        return graph.forward

    for layer in model.layers if is_before else ():
        layer.compile(backend=backend)
    stages = split(model, 2, example={"x": rows()})
    for stage in () if is_before else stages.modules:
        stage.compile(backend=backend)
    with torch.no_grad():
        same(model, stages, {"x": rows()})
    assert compiled
    assert [layer._compiled_call_impl is not None for layer in stages[1].layers] == [False, False, True, True]


def test_the_error_of_a_forward_that_needs_values_is_told() -> None:
    class Routed(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            if not isinstance(x.sum().item(), float):
                raise ValueError
            return super().forward(x)[:, :2], x

    class Routing(Blocks):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            y = self.layers[0](x)[0] * 2
            for layer in self.layers[1:]:
                x = x + layer(x)[0].sum()
            return y @ y.T @ x

    stages = split(Routing(layer=Routed), 3, ["layers.1", "layers.2"], example={"x": rows()})
    told = r"needs the shape of what Routed returns .* at .*test_other_stages.py:\d+ \(.*item.* \(PipelineError: .*item"
    with pytest.raises(PipelineError, match=told):
        stages.run({"x": rows()})
