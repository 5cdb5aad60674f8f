"""Stages wired by hand: edges, inputs, groups of neighbours, and what is said when they do not fit."""

import copy
import pickle
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from rota.core.errors import PipelineError, SplitError
from rota.models import StageEdge, Stages, split
from support.networks import batch_of, graph_of_layers
from support.odd_stages import Calls


class Fork(nn.Module):
    """Two halves of what a linear layer makes, by name, and the number of columns of each."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> dict[str, object]:
        left, right = self.linear(x).chunk(2, dim=1)
        return {"left": left, "right": (right, right.shape[1])}


class Grow(nn.Module):
    """Scales a tensor by the number that comes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, pair: tuple[Tensor, int]) -> Tensor:
        return self.linear(pair[0]) * pair[1]


class Join(nn.Module):
    """Adds two branches, and masks the sum."""

    def forward(self, left: Tensor, right: Tensor, mask: Tensor, scale: float) -> Tensor:
        return (left + right) * mask * scale


def diamond() -> Stages:
    return Stages(
        [Fork(), nn.Linear(3, 3), Grow(), Join()],
        edges=[(0, 1, "left"), (0, 2, "right"), (1, 3), (2, 3)],
        inputs={0: ("x",), 3: ("mask", "scale")},
        input_names=("x", "mask", "scale"),
        input_defaults={"scale": 2.0},
    )


def test_branches_that_join_give_what_the_modules_give() -> None:
    stages = diamond()
    fork, left, grow, _ = stages.modules
    x, mask = torch.randn(5, 4), torch.ones(5, 3)
    halves = fork(x)
    expected = (left(halves["left"]) + grow(halves["right"])) * mask * 2.0
    for batch in ((x, mask), {"x": x, "mask": mask}, [x, mask, 2.0]):
        assert torch.equal(stages.run(batch), expected)


def test_default_is_a_chain_whose_first_stage_reads_input_0() -> None:
    modules = [nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 2)]
    stages = Stages(modules)
    x = torch.randn(3, 2)
    assert stages.edges == (StageEdge(0, 1), StageEdge(1, 2))
    assert stages.inputs == ((0,), (), ())
    assert len(stages) == 3
    assert stages[1] is modules[1]
    assert stages.sink == 2
    for batch in (x, (x, "targets"), [x]):
        assert torch.equal(stages.run(batch), nn.Sequential(*modules)(x))


def test_graph_is_told_edge_by_edge() -> None:
    stages = Stages([nn.Identity() for _ in range(4)], edges=[(3, 1), (3, 0), (0, 2), (1, 2)])
    assert stages.order() == (3, 0, 1, 2)
    assert stages.incoming(2) == (StageEdge(0, 2), StageEdge(1, 2))
    assert stages.outgoing(3) == (StageEdge(3, 1), StageEdge(3, 0))
    assert stages.inputs == ((), (), (), (0,))


def test_arguments_come_in_the_order_of_the_edges() -> None:
    modules = [nn.Linear(2, 2), nn.Linear(2, 2), Calls(lambda _, first, second: first - second)]
    x = torch.randn(1, 2)
    forwards, backwards = Stages(modules, [(0, 2), (1, 2)]), Stages(modules, [(1, 2), (0, 2)])
    assert torch.equal(forwards.run(x), -backwards.run(x))
    assert torch.equal(forwards.call(2, (x, 2 * x), batch=None), -x)


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([(0, 3)], r"edges\[0\] names stage 3, but there are 3 stages: use stages 0 to 2"),
        ([(0, 1, "x"), (0, 1, "y")], r"edges\[1\] is a second edge 0 -> 1: at most one .* one tuple or dict"),
        ([(0,)], r"edges\[0\] is \(0,\): give \(source, target\)"),
        ([(0, 1), (1, 2), (2, 1)], "in a cycle, 1 -> 2 -> 1: remove one"),
    ],
)
def test_edges_that_cannot_be(edges: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(SplitError, match=message):
        Stages([nn.Identity() for _ in range(3)], edges)


def test_loss_needs_one_final_stage() -> None:
    stages = Stages([nn.Identity() for _ in range(3)], [(0, 1), (0, 2)])
    with pytest.raises(SplitError, match="stages 1, 2 send their output nowhere, but the loss needs exactly one final"):
        _ = stages.sink


def test_ties_are_found_whenever_they_are_made() -> None:
    embed, head, middle = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False), nn.Linear(3, 3)
    head.weight = embed.weight
    assert Stages([embed, middle, nn.Sequential(head, head)]).ties == (((0, "weight"), (2, "0.weight")),)
    stages = Stages([middle, nn.Linear(3, 3)])
    assert stages.ties == ()
    stages[1].weight = middle.weight
    assert stages.ties == (((0, "weight"), (1, "weight")),)
    assert [name for name, _ in stages.named_parameters()] == ["0.weight", "0.bias", "1.bias"]


def test_repeated() -> None:
    stages = Stages(
        [nn.Linear(2, 2), nn.Linear(2, 2), nn.Bilinear(2, 2, 2)], [(0, 1), (0, 2), (1, 2)], {0: "x", 2: ()}, ["x"]
    )
    twice = stages.repeated(2)
    assert [edge[:2] for edge in twice.edges] == [(0, 1), (0, 2), (1, 2), (3, 4), (3, 5), (4, 5)]
    assert (twice.sinks, twice.sink, twice.num_components) == ((2, 5), 2, 2)
    assert twice.inputs == stages.inputs * 2
    assert {places[0][0] + 3 == places[1][0] for places in twice.ties} == {True}
    assert dict(twice.named_parameters()).keys() == dict(stages.named_parameters()).keys()
    assert torch.equal(twice.run(torch.ones(1, 2)), stages.run(torch.ones(1, 2)))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([0], "inputs has 1 entries for 2 stages"),
        ({0: -1}, r"inputs\[0\] has -1: give positions"),
        ({1: ("y",)}, r"inputs\[1\] has 'y', which is not one of input_names \('x',\)"),
    ],
)
def test_inputs_that_cannot_be(inputs: object, message: str) -> None:
    with pytest.raises(SplitError, match=message):
        Stages([nn.Identity(), nn.Identity()], inputs=inputs, input_names=["x"])  # type: ignore[arg-type]


def test_modules_that_cannot_be() -> None:
    with pytest.raises(SplitError, match="at least one stage"):
        Stages([])
    with pytest.raises(SplitError, match=r"modules\[1\] is a function"):
        Stages([nn.Identity(), lambda x: x])  # type: ignore[list-item]


def test_batch_that_lacks_an_input_is_told_what_it_has() -> None:
    stages, x = diamond(), torch.randn(5, 4)
    with pytest.raises(PipelineError, match=r"stage 3 reads input 'mask', which the batch lacks .it has a dict with"):
        stages.run({"x": x})
    with pytest.raises(PipelineError, match=r"'mask', .*.it has 1 by position.*names are 'x', 'mask', 'scale'.*add it"):
        stages.run(x)
    with pytest.raises(PipelineError, match=r"stage 0 reads input 0, which the batch lacks .*dict with 'x'.*not given"):
        Stages([nn.Identity()]).run({"x": x})


def test_edge_whose_key_is_not_there() -> None:
    stages = Stages([nn.Identity(), nn.Identity()], [(0, 1, "out")])
    with pytest.raises(PipelineError, match=r"edge 0 -> 1 takes \['out'\] of the output of stage 0, a Tensor"):
        stages.run(torch.ones(1))
    with pytest.raises(PipelineError, match=r"a dict with keys \['in'\]"):
        StageEdge(0, 1, "out").take({"in": 1})
    with pytest.raises(PipelineError, match=r"takes \[3\] .*a tuple with keys \[0, 1\]"):
        StageEdge(0, 1, 3).take((1, 2))


def test_names_say_what_the_model_calls_its_weights() -> None:
    stages = Stages(
        [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)],
        names=[{"0": "embed", "1": "layers.0"}, "layers.1"],
    )
    names = ["embed.weight", "embed.bias", "layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]
    assert [name for name, _ in stages.named_parameters()] == names
    assert [name for name, _ in stages.repeated(2).named_parameters()] == names
    assert [name for name, _ in stages.with_modules(stages.modules).named_parameters()] == names
    modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
    with pytest.raises(SplitError, match="names has 1 entries for 2 stages"):
        Stages(modules, names=["a"])
    with pytest.raises(SplitError, match=r"names\[1\] has 'head', which is not a module or weight of stage 1"):
        Stages(modules, names=["a", {"head": "b"}])


SKIPS = [(0, 1), (0, 2), (1, 2), (1, 4), (2, 3), (0, 3), (3, 4)]
CUTS = [cuts for number in range(5) for cuts in combinations(range(1, 5), number)]


@pytest.mark.parametrize("cuts", CUTS)
def test_any_groups_of_a_dag_compute_the_same(cuts: tuple[int, ...]) -> None:
    stages, (x, _) = graph_of_layers(5, SKIPS), batch_of(1)
    expected = stages.run(x)
    fewer = split(stages, len(cuts) + 1, cuts)
    assert len(fewer) == len(cuts) + 1
    assert fewer.cuts == tuple(map(str, cuts))
    for again in (fewer, Stages(copy.deepcopy(fewer.modules), fewer.edges, fewer.inputs)):
        assert torch.equal(again.run(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(fewer)).run(x), expected)
    assert {name for name, _ in fewer.named_parameters()} == {
        f"{stage}.{name}" for stage in range(5) for name, _ in stages[stage].named_parameters()
    }
    assert {p for _, p in fewer.named_parameters()} == {p for module in stages.modules for p in module.parameters()}


@pytest.mark.parametrize("cuts", [(), (1,), (2,), (3,), (1, 3), (1, 2, 3)])
def test_inputs_defaults_and_keys(cuts: tuple[int, ...]) -> None:
    stages, x, mask = diamond(), torch.randn(5, 4), torch.rand(5, 3)
    fewer = split(stages, len(cuts) + 1, cuts)
    assert torch.equal(fewer.run({"x": x, "mask": mask}), stages.run({"x": x, "mask": mask}))
    assert torch.equal(fewer.run((x, mask, 3.0)), stages.run((x, mask, 3.0)))
    assert fewer.inputs[-1] == (("x", "mask", "scale") if not cuts else ("mask", "scale"))
