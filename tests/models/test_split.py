"""split: the stages of a model do what the model does, bit by bit, with the model's own parameters and names."""

import copy
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import rota
from rota import Cluster, Costs, CutPoint, Plan, SplitError, Stages, place, split
from rota.models import finest
from rota.models.unmodified import find_blocks
from rota.schedules import one_f_one_b
from support.networks import StepResult, assert_equal_steps, pipeline_steps, serial_step
from support.pool import Pool
from support.sampling import some

WIDTH, WORDS = 4, 7


class Block(nn.Module):
    """A layer that decides by its data, as no trace could."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.linear(self.norm(x))
        if y.sum() > 0:
            y = y.tanh()
        if mask is not None:
            y = y * mask
        return x + y


class GPT(nn.Module):
    """Embeddings, blocks with a cut point after each, a head; `kind` says how it keeps its cut points."""

    def __init__(self, num_blocks: int = 4, kind: str = "list") -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.position = nn.Parameter(torch.randn(16, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        cuts = [CutPoint() for _ in range(num_blocks)]
        self.cuts: Any = nn.ModuleList(cuts) if kind == "ModuleList" else cuts if kind == "list" else None
        if kind == "attributes":
            for index, cut in enumerate(cuts):
                setattr(self, f"cut{index}", cut)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens) + self.position[torch.arange(tokens.shape[1], device=tokens.device)]
        for index, block in enumerate(self.blocks):
            x = block(x, mask)
            x = (self.cuts[index] if self.cuts is not None else getattr(self, f"cut{index}"))(x)
        return self.head(self.norm(x) * 2)


class Plain(nn.Module):
    """Any forward over four linear layers and three cut points."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.cuts = [CutPoint() for _ in range(3)]


def tokens() -> Tensor:
    return torch.randint(0, WORDS, (2, 5), generator=torch.Generator().manual_seed(0))


def values() -> Tensor:
    return torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def grads(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor | None]:
    by_name = {name: parameter.grad for name, parameter in parameters}
    return {name: grad for name, grad in by_name.items() if grad is not None}


def assert_same(model: nn.Module, stages: Stages, batch: Any) -> None:
    """Outputs and gradients, exactly; parameters by the names they have in the model."""
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch if isinstance(batch, tuple) else (batch,), {})
    whole = copy.deepcopy(model)
    expected = whole(*args, **kwargs)
    expected.square().sum().backward()
    model.zero_grad()
    output = stages.run(batch)
    output.square().sum().backward()
    assert torch.equal(output, expected)
    wanted, got = grads(whole.named_parameters()), grads(stages.named_parameters())
    assert wanted.keys() == got.keys()
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)
    own = dict(model.named_parameters())
    assert all(parameter is own[name] for name, parameter in stages.named_parameters())


@pytest.mark.parametrize("kind", ["list", "ModuleList", "attributes"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_gpt(kind: str, num_stages: int) -> None:
    model = GPT(kind=kind).double()
    mask = torch.ones(2, 5, 1, dtype=torch.float64).tril()
    stages = split(model, num_stages, example=(tokens(), mask))
    assert len(stages) == num_stages
    for batch in (tokens(), (tokens(), mask), {"mask": mask, "tokens": tokens()}):
        assert_same(model, stages, batch)
    assert [name for name, _ in stages.named_parameters()] == [name for name, _ in model.named_parameters()]


def test_gpt_table() -> None:
    stages = split(GPT(), 3, cuts=[0, "cuts[2]"], example=tokens())
    assert stages.table().splitlines() == [
        "stage  holds                      parameters  bytes  reads   sends to",
        "0      position, embed, blocks.0  120         480    tokens  1",
        "1      blocks.1-2                 56          224    -       2",
        "2      blocks.3, norm, head       71          284    -       -",
        "0 -> 1  cuts[0]  float32[2, 5, 4]  160 bytes",
        "1 -> 2  cuts[2]  float32[2, 5, 4]  160 bytes",
    ]


@settings(derandomize=True, max_examples=some(25))
@given(st.data())
def test_any_cuts_of_any_gpt(data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(1, 6))
    cuts = data.draw(st.lists(st.integers(0, num_blocks - 1), unique=True, max_size=num_blocks))
    model = GPT(num_blocks).double()
    stages = split(model, len(cuts) + 1, cuts, example=tokens())
    assert len(stages) == len(cuts) + 1
    assert_same(model, stages, tokens())


@settings(derandomize=True, max_examples=some(25))
@given(num_blocks=st.integers(0, 12), num_stages=st.integers(1, 13))
def test_default_cuts_are_even(num_blocks: int, num_stages: int) -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(num_blocks + 1)))
    if num_stages > num_blocks + 1:
        with pytest.raises(SplitError, match=f"{num_stages} stages need {num_stages - 1} cuts, but there are"):
            split(model, num_stages)
        return
    sizes = [len(list(stage.parameters())) // 2 for stage in split(model, num_stages)]
    assert sum(sizes) == num_blocks + 1
    assert max(sizes) - min(sizes) <= 1


class Expert(Block):
    """A block of which one part is a list."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(expert(x) for expert in self.experts)


@pytest.mark.parametrize(
    "layers",
    [
        lambda: nn.ModuleDict({str(i): Expert() for i in range(3)}),
        lambda: nn.Sequential(*(Expert() for _ in range(3))),
        lambda: nn.ModuleList(Expert() for _ in range(3)),
    ],
    ids=["dict", "sequential", "list"],
)
def test_alike_layers_are_blocks_and_lists_inside_of_them_are_not(layers: Callable[[], nn.Module]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ends = nn.ModuleDict({"first": nn.Linear(WIDTH, WIDTH), "last": nn.LayerNorm(WIDTH)})
            self.layers = layers()

        def forward(self, x: Tensor) -> Tensor:
            x = self.ends["first"](x)
            for layer in self.layers.children():
                x = layer(x)
            return self.ends["last"](x)

    model = Model().double()
    assert find_blocks(model) == ["layers.0", "layers.1", "layers.2"]
    stages = split(model, 3, example=values())
    held = [{name.split(".norm")[0] for name, _ in stage.named_parameters() if ".norm." in name} for stage in stages]
    assert held == [{"layers.0"}, {"layers.1"}, {"layers.2"}]
    assert_same(model, stages, values())


@pytest.mark.parametrize(
    ("model", "cuts", "chosen"),
    [
        (GPT, ["cuts[1]"], ("cuts[1]",)),
        (GPT, ["cuts.3", 0], ("cuts[0]", "cuts[3]")),
        (GPT, ["cuts.*"], tuple(f"cuts[{i}]" for i in range(4))),
        (lambda: nn.Sequential(*(Block() for _ in range(4))), ["3", "1"], ("1", "3")),
        (lambda: nn.Sequential(*(Block() for _ in range(4))), ["*"], ("1", "2", "3")),
        (lambda: Stages([Block() for _ in range(4)]), ["2"], ("2",)),
    ],
)
def test_possible_cuts(model: Callable[[], nn.Module | Stages], cuts: list[int | str], chosen: tuple[str, ...]) -> None:
    made = model()
    stages, names = finest(made, tokens(), cuts)
    assert (names, stages.cuts, len(stages)) == (chosen, chosen, len(chosen) + 1)
    for unknown in ("blocks.*", "blocks.2"):
        with pytest.raises(SplitError, match=rf"cuts has '{unknown}', which is not a possible cut.* cuts are: "):
            finest(made, tokens(), [*cuts, unknown])


def test_skip_over_stages_and_several_values_on_one_edge() -> None:
    class Model(Plain):
        def forward(self, x: Tensor) -> Tensor:
            start = self.a(x)
            size, half = x.shape[0], start * 0.5
            x = self.cuts[0](start)
            y = self.cuts[1](self.b(x) + half)
            z = self.cuts[2](self.c(y))
            return self.d(z + start).reshape(size, -1) * size

    model = Model().double()
    chain, direct = (split(model, 4, example=values(), direct_skips=skips) for skips in (False, True))
    assert [edge[:2] for edge in chain.edges] == [(0, 1), (1, 2), (2, 3)]
    assert [edge[:2] for edge in direct.edges] == [(0, 1), (1, 2), (0, 3), (2, 3)]
    sent = {target: [value.name for value in direct.carried if value[:2] == (0, target)] for target in (1, 3)}
    assert sent == {1: ["a", "cuts[0]"], 3: ["a"]}
    for stages in (chain, direct):
        assert_same(model, stages, values())


def test_inputs_are_read_where_they_are_used() -> None:
    class Model(Plain):
        def forward(self, x: Tensor, mask: Tensor, scale: float = 3.0) -> Tensor:
            x = self.cuts[0](self.a(x))
            x = self.cuts[1](self.b(x) * mask)
            return self.d(self.cuts[2](self.c(x)).to(mask.device, mask.dtype)) * scale

    model = Model().double()
    mask = torch.ones(WIDTH, dtype=torch.float64)
    stages = split(model, 4, example=(values(), mask, 2.0))
    assert stages.inputs == (("x", "mask", "scale"), ("mask", "scale"), ("scale",), ("scale",))
    for batch in ((values(), mask), (values(), mask, 0.5), {"mask": mask, "x": values()}):
        assert_same(model, stages, batch)


class Masked(Plain):
    """The mask is read by the last two layers alone, the shift by the second."""

    def forward(self, x: Tensor, shift: Tensor, mask: Tensor) -> Tensor:
        x = self.cuts[0](torch.tanh(self.a(x)))
        x = self.cuts[1](torch.tanh(self.b(x + shift)))
        x = self.cuts[2](torch.tanh(self.c(x * mask)))
        return self.d(x * mask)


def step(rank: int, stages: Stages, plan: Plan, inputs: list[Any], targets: Tensor) -> StepResult:
    """`inputs[rank]` is all that the rank is given."""
    (result,) = pipeline_steps(rank, stages, plan, [(inputs[rank], targets if rank == stages.sink else None)])
    return result


@pytest.mark.dist
@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("form", ["dict", "own entries", "tuple"])
def test_each_rank_may_be_given_what_it_reads(pool: Pool, num_stages: int, form: str) -> None:
    torch.manual_seed(2)
    x, shift, mask, targets = torch.randn(4, 8, WIDTH, dtype=torch.float64)
    batch = {"x": x, "shift": shift, "mask": mask}
    stages = split(Masked().double(), num_stages, example=batch)
    inputs: list[Any] = [
        (tuple(batch.values()) if form == "tuple" else batch) if read else None for read in stages.inputs
    ]
    if form == "own entries":
        inputs = [{str(name): batch[str(name)] for name in read} or None for read in stages.inputs]
    plan = one_f_one_b(place(Costs.uniform(num_stages), Cluster.uniform(num_stages)), 4)
    by_rank = pool.run(num_stages, step, stages, plan, inputs, targets)
    assert_equal_steps(by_rank, serial_step(stages, batch, targets))


class Counting(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.unused = nn.Linear(1, 1)
        self.register_buffer("kept", torch.ones(WIDTH))
        self.register_buffer("lost", torch.ones(WIDTH), persistent=False)
        self.register_buffer("calls", torch.zeros(()))
        self.plain = torch.full((WIDTH,), 2.0, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cuts[0](self.a(x) * self.kept)
        self.calls.add_(1)
        x = self.cuts[1](self.b(x) * self.scale * self.lost * self.kept)
        return x * self.plain + torch.tensor([0.5, 1.0, 2.0, 4.0])


def test_parameters_and_buffers_read_by_the_forward_move_to_their_stage() -> None:
    model = Counting().double()
    stages = split(model, 3, example=values())
    assert [dict(stage.named_parameters(recurse=False)).keys() for stage in stages] == [set(), {"scale"}, set()]
    again = pickle.loads(pickle.dumps(stages))
    for version in (stages, again, copy.deepcopy(stages)):
        assert [{name for name in stage.state_dict() if "." not in name} for stage in version] == [
            {"kept"},
            {"kept", "scale"},
            {"calls"},  # which nothing reads
        ]
    assert torch.equal(again.run(values()), stages.run(values()))
    assert model.calls.item() == 1  # and not 2: `again` has its own
    assert_same(model, stages, values())


def test_cut_point_around_a_tuple_and_nested_output() -> None:
    class Model(Plain):
        def forward(self, x: Tensor) -> dict[str, Any]:
            first, second = self.cuts[0]((self.a(x), self.b(x)))
            return {"sum": self.cuts[1](self.c(first) + second), "parts": [first, (x, None)]}

    model = Model().double()
    stages, x = split(model, 3, example=values()), values()
    assert torch.equal(stages.run(x)["sum"], model(x)["sum"])
    assert torch.equal(stages.run(x)["parts"][0], model(x)["parts"][0])
    assert stages.run(x)["parts"][1][0] is x


def test_stages_follow_train_and_eval_and_keep_frozen_modules() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), CutPoint(), nn.BatchNorm1d(5), nn.Dropout(0.5)).double()
    model[2].eval()
    model.forward(values())
    stages = split(model, 2, example=values())
    assert [name for name, _ in stages[1].named_parameters()] == ["2.weight", "2.bias"]
    assert model.training
    assert model[3].training
    assert not model[2].training
    assert stages[1].training
    for stage in stages:
        stage.eval()
    assert torch.equal(stages.run(values()), model.eval()(values()))


@pytest.mark.parametrize(
    ("num_stages", "cuts"), [(1, None), (2, None), (4, None), (3, [2, 5]), (3, ["5", 1]), (6, None)]
)
def test_sequential_is_cut_between_children(num_stages: int, cuts: list[int | str] | None) -> None:
    model = nn.Sequential(*(Block() if index % 2 else nn.Linear(WIDTH, WIDTH) for index in range(6))).double()
    stages = split(model, num_stages, cuts)
    assert [name for name, _ in stages.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert_same(model, stages, values())
    assert torch.equal(stages.run({"input": values()}), model(values()))


def test_sequential_child_that_comes_twice() -> None:
    layer, act = nn.Linear(WIDTH, WIDTH), nn.Tanh()
    model = nn.Sequential(layer, act, nn.Linear(WIDTH, WIDTH), act).double()
    assert_same(model, split(model, 2), values())
    model = nn.Sequential(layer, act, layer).double()
    stages = split(model, 3)
    assert stages.ties == (((0, "0.weight"), (2, "2.weight")), ((0, "0.bias"), (2, "2.bias")))
    assert_same(model, stages, values())


def test_one_stage_is_the_model_itself() -> None:
    model = Block()
    stages = split(model, 1)
    assert stages.modules == (model,)
    assert stages.inputs == (("x", "mask"),)
    assert stages.input_defaults == {"mask": None}


def test_tied_parameter_in_one_stage_and_in_two() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleDict({"embed": nn.Embedding(WORDS, WIDTH)})
            self.head = nn.Linear(WIDTH, WORDS, bias=False)
            self.last = nn.Linear(WORDS, WORDS)
            self.head.weight = self.inner["embed"].weight
            self.cuts = [CutPoint() for _ in range(2)]

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.inner["embed"](tokens)
            return self.last(self.cuts[1](self.head(self.cuts[0](x))))

    model = Tied().double()
    stages = split(model, 2, cuts=[1], example=tokens())
    assert [name for name, _ in stages[0].named_parameters()] == ["inner.embed.weight"]
    assert_same(model, stages, tokens())
    assert stages.ties == ()
    stages = split(model, 2, cuts=[0], example=tokens())
    assert stages.ties == (((0, "inner.embed.weight"), (1, "inner.embed.weight")),)
    assert [name for name, _ in stages.named_parameters()] == ["inner.embed.weight", "last.weight", "last.bias"]
    assert_same(model, stages, tokens())


@pytest.mark.parametrize(
    ("num_stages", "cuts", "message"),
    [
        (0, None, "num_stages is 0: give at least 1"),
        (6, None, r"6 stages need 5 cuts, but there are 4 possible .*CutPoint.*0 \(cuts\[0\]\), .* at most 5 stages"),
        (3, [1], r"cuts \[1\] are 1, but 3 stages need 2"),
        (3, [1, "cuts[1]"], r"cuts \[1, 'cuts\[1\]'\] have 1 twice"),
        (2, ["cut[1]"], r"cuts has 'cut\[1\]', which is not a possible cut, did you mean 'cuts\[1\]'\?"),
    ],
)
def test_cuts_that_cannot_be(num_stages: int, cuts: list[int | str] | None, message: str) -> None:
    with pytest.raises(SplitError, match=message):
        split(GPT(), num_stages, cuts, example=tokens() if num_stages > 1 else None)


@pytest.mark.parametrize("model", [Block(), GPT()], ids=["unmodified", "with CutPoints"])
def test_without_an_example(model: nn.Module) -> None:
    how = r"give one small batch, example=make_batch\(1\)\[0\] if .* example=\{'\w+': …\}; or .*Stages\(modules, edges"
    with pytest.raises(SplitError, match=rf"what crosses the cuts of {type(model).__name__}: {how}"):
        split(model, 2)


class Towers(nn.Module):
    """Many small blocks before few large ones, with an embedding that has more parameters than all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4096, 8)
        self.vision = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
        self.widen = nn.Linear(8, 64)
        self.language = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.vision:
            x = block(x)
        x = self.widen(x)
        for block in self.language:
            x = block(x)
        return x


IDS = {"ids": torch.tensor([[1, 2]])}


def test_blocks_are_weighed_by_their_parameters() -> None:
    assert rota.split(Towers(), 2, example=IDS).cuts == ("language.2",)
    assert rota.split(Towers(), 4, example=IDS).cuts == ("language.1", "language.2", "language.3")
    assert rota.split(Towers(), 2, ["vision.*"], example=IDS).cuts == ("vision.7",)


def test_equal_blocks_are_spread_evenly() -> None:
    model = Towers()
    model.vision = nn.ModuleList()
    for num_stages in (2, 3, 4):
        sizes = [len(stage.holds) for stage in rota.split(model, num_stages, example=IDS).modules]  # type: ignore[union-attr, arg-type]
        assert sum(sizes) == 6
        assert len({*sizes[1:]}) <= 2


def test_a_text_is_one_cut_or_pattern() -> None:
    assert rota.split(Towers(), 2, "language.*", example=IDS).cuts == ("language.2",)
    assert rota.split(Towers(), 2, "widen", example=IDS).cuts == ("widen",)
    assert finest(Towers(), IDS, "language.*")[1] == tuple(f"language.{i}" for i in range(4))
    sequential = nn.Sequential(*(nn.Linear(2, 2) for _ in range(12)))
    assert rota.split(sequential, 2, "10").cuts == ("10",)
    assert finest(sequential, cuts="10")[1] == ("10",)
    assert Stages([nn.Linear(2, 2)], inputs={0: "ids"}, input_names="ids").input_names == ("ids",)
    for argument in ("names", "inputs"):
        with pytest.raises(SplitError, match=rf"{argument} is the text 'ab': give a list with one entry per stage"):
            Stages([nn.Linear(2, 2), nn.Linear(2, 2)], **{argument: "ab"})
