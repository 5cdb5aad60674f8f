"""The varuna door in one process: where it cuts, what it refuses, and which configuration it picks."""

import math
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rota import Cluster, Costs, FormatError, Link, PipelineError, SearchError, SplitError, materialize, place, simulate
from rota.compat.varuna import AutoConfig, CutPoint
from rota.compat.varuna.cutting import boundaries, cut, cuts_by, dry_run, share, stage_costs
from rota.compat.varuna.inputs import num_rows, sample_of, stages_to_ranks, to_micro_batches
from rota.compat.varuna.profiler import Profile
from rota.schedules import varuna

NUM_CUTS, WIDTH = 4, 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_CUTS + 1))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.cutpoints = [CutPoint() for _ in range(NUM_CUTS)]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.norm(x)
        for layer, cut_point in zip(self.layers, self.cutpoints, strict=False):
            x = cut_point(torch.tanh(layer(x)))
        return ((self.layers[NUM_CUTS](x) - y) ** 2).mean()


def batch(rows: int = 4) -> dict[str, Tensor]:
    x, y = torch.randn(2, rows, WIDTH, generator=torch.Generator().manual_seed(rows))
    return {"x": x, "y": y}


@pytest.mark.parametrize("num_stages", range(1, NUM_CUTS + 2))
def test_any_number_of_stages(num_stages: int) -> None:
    model = Net().eval()
    assert dry_run(model, batch(), 4) == NUM_CUTS
    loss = model(**batch())
    stages = cut(model, num_stages, (), None, batch())
    assert len(stages) == num_stages
    assert torch.equal(stages.run(batch()), loss)
    assert {name for name, _ in stages.named_parameters()} == {name for name, _ in model.named_parameters()}


def test_costs_say_where_to_cut() -> None:
    costs = Costs((9, 1, 1, 1, 1), (9, 1, 1, 1, 1))
    assert boundaries(costs, 2) == [0, 1, 5]
    assert cuts_by(costs, 2, NUM_CUTS) == [0]
    assert cuts_by(costs, 3, NUM_CUTS) == [0, 1]  # the last stage does not recompute
    assert boundaries(Costs((6, 0, 0), (0, 6, 7)), 2) == [0, 1, 3]
    stages = cut(Net(), 2, (), cuts_by(costs, 2, NUM_CUTS), batch())
    assert [n for n, _ in stages[0].named_parameters() if "layers" in n] == ["layers.0.weight", "layers.0.bias"]
    free = Costs.uniform(5, 0, 0)
    assert boundaries(free, 5) == [0, 1, 2, 3, 4, 5]  # no stage is empty
    with pytest.raises(SplitError, match="6 stages out of 5 pieces; add CutPoints"):
        boundaries(free, 6)
    with pytest.raises(SplitError, match="costs are those of 5 pieces, but 2 CutPoints make 3"):
        cuts_by(free, 2, 2)


def test_the_costs_of_stages_are_those_of_their_pieces() -> None:
    costs = Costs(
        (4, 3, 2), (8, 6, 4), activation_bytes=(10, 20, 30), boundary_bytes=(5, 7), static_bytes=(1, 2, 3), reduce_us=9
    )
    assert boundaries(costs, 2) == [0, 1, 3]
    assert stage_costs(costs, 2) == Costs(
        (4, 5),
        (8, 10),
        activation_bytes=(10, 50),
        boundary_bytes=(5,),
        static_bytes=(1, 5),
        reduce_us=(9, 18),
        recompute_us=(4, None),
        checkpoint_bytes=(0, 5),
    )
    assert stage_costs(Costs.uniform(4, boundary_bytes=3, activation_bytes=2), 2).checkpoint_bytes == (0, 3)


class Model(nn.Module):
    """One layer, some CutPoints, and any forward over them."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.points, self.run = nn.Linear(WIDTH, WIDTH), [CutPoint(), CutPoint()], run
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.run(self, x).sum()


def skips(model: Any, x: Tensor) -> Tensor:
    first = model.layer(x)
    return model.points[1](model.points[0](first) * 2) + first


def test_what_goes_through_a_cut_point() -> None:
    x = {"x": torch.ones(4, WIDTH)}
    with pytest.raises(SplitError, match=r"CutPoint points\[0\] is called twice"):
        dry_run(Model(lambda model, x: model.points[0](model.points[0](x) * 2)), x, 4)
    with pytest.raises(SplitError, match=r"CutPoint points\[0\] is given a tuple; give it one tensor"):
        dry_run(Model(lambda model, x: model.points[0]((x, x))[0]), x, 4)
    model, state = Model(lambda model, x: model.points[1](x.T) * torch.rand(())), torch.get_rng_state()
    with pytest.raises(SplitError, match=r"CutPoint points\[1\] is given a tensor of shape \[6, 4\] for 4 examples"):
        dry_run(model, x, 4)
    assert model.seen == 0
    assert torch.equal(state, torch.get_rng_state())
    model(**x)  # nothing is left behind
    with pytest.raises(SplitError, match="stage 2 uses what stage 0 makes, past the stages between"):
        cut(Model(skips), 3, (), None, x)
    assert len(cut(Model(skips), 2, (), None, x)) == 2  # two values over one boundary are no trouble


def test_a_weight_on_two_sides_of_a_cut_is_named() -> None:
    model, x = Model(lambda model, x: model.layer(model.points[0](model.layer(x)))), {"x": torch.ones(4, WIDTH)}
    told = "stage 0 has the weight 'layer.weight', which is also 'layer.weight' in stage 1; register a Parameter of"
    with pytest.raises(SplitError, match=told):
        cut(model, 2, (), None, x)
    assert len(cut(model, 1, (), None, x)) == 1


def test_sharing_any_number_of_weights() -> None:
    model = Net()
    names = [f"layers.{i}.weight" for i in range(4)]
    share(model, [(names[0], names[1]), (names[2], names[3]), (names[1], names[2])])
    weights = {model.get_parameter(name) for name in names}
    assert len(weights) == 1
    assert torch.equal(weights.pop(), Net().layers[0].weight)
    stages = cut(model, 5, [(names[0], name) for name in names[1:]], None, batch())
    assert stages.ties == (tuple((stage, names[0]) for stage in range(4)),)
    for pairs, told in (
        ([("layers.0.weight", "layers.9.weight")], "no such parameter, did you mean 'layers.4.weight'"),
        ([("layers.0.weight", "layers.0.bias")], r"'layers.0.weight' is \[6, 6\].* cannot be shared"),
        (["layers.0.weight"], "give pairs of parameter names"),
    ):
        with pytest.raises(SplitError, match=told):
            share(model, pairs)  # type: ignore[arg-type]


def test_weights_of_other_stages_are_let_go() -> None:
    model = Net()
    pairs = [("layers.0.weight", "layers.2.weight"), ("layers.1.weight", "layers.4.weight")]
    share(model, pairs)
    stages = cut(model, 5, pairs, None, batch())
    ties, names = stages.ties, [name for name, _ in stages.named_parameters()]
    materialize(stages, [2])
    there = {name for name, p in stages.named_parameters() if p.device.type == "cpu"}
    assert there == {"layers.0.weight", "layers.2.bias"}  # the first is tied to layers.2.weight
    assert stages.ties == ties
    assert [name for name, _ in stages.named_parameters()] == names
    assert stages[0].norm.running_mean.is_meta


def test_the_map_of_stages_to_ranks() -> None:
    assert stages_to_ranks("0,2;1,3;", 4) == [[0, 2], [1, 3]]
    assert stages_to_ranks("0;1;2", 3) == [[0], [1], [2]]
    for text, num_processes, told in (
        ("0,1;2;", 3, "has 2, 1 ranks for its stages"),
        ("0;0;", 2, "name each once"),
        ("0;1;", 3, "there are 3 processes"),
        ("a;b;", 2, "such as '0,2;1,3;'"),
    ):
        with pytest.raises(PipelineError, match=told):
            stages_to_ranks(text, num_processes)  # type: ignore[arg-type]


def test_a_batch_in_micro_batches() -> None:
    x = torch.arange(10).view(5, 2)
    parts = to_micro_batches({"none": None, "x": x, "n": 3, "scalar": torch.tensor(2.0)}, 5, 2)
    assert [part["x"].tolist() for part in parts.inputs] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9]]]
    assert [len(size) for size in parts.sizes] == [2, 2, 1]
    assert all((part["none"], part["n"], part["scalar"].item()) == (None, 3, 2.0) for part in parts.inputs)
    with pytest.raises(PipelineError, match=r"inputs\['x'\] has 5 rows, but a replica's part of the batch has 6"):
        to_micro_batches({"x": x}, 6, 2)
    with pytest.raises(PipelineError, match="the inputs 'n' hold no tensor with examples"):
        to_micro_batches({"n": 3}, 5, 2)
    assert num_rows(sample_of({"n": 1, "x": x}, 7)) == 5
    assert num_rows(sample_of(batch, 7)) == 7
    with pytest.raises(PipelineError, match="get_batch_fn returned a Tensor; return a dictionary"):
        sample_of(lambda size: x, 2)  # type: ignore[arg-type, return-value]


def a_profile(**costs: Any) -> Profile:
    """Of pieces that take longer, yet less for each example, with larger micro-batches."""
    of = {
        size: Costs(
            tuple(us * (size + 1) for us in (4, 7, 3, 5)),
            tuple(us * (size + 1) for us in (8, 2, 30, 9)),
            activation_bytes=100 * size,
            boundary_bytes=10 * size,
            static_bytes=(50, 90, 50, 60),
            **costs,
        )
        for size in (1, 2, 4)
    }
    return Profile(of, (20, 40, 20, 30), Link(1, 10), Link(5, 2))


def step_us(profile: Profile, num_stages: int, replicas: int, size: int, batch_size: int, at: tuple[int, ...]) -> int:
    """By hand: a cut at `at`, two ranks a node."""
    parts = [slice(*part) for part in pairwise((0, *at, 4))]
    costs = profile.costs[size]
    forward = tuple(sum(costs.forward_us[part]) for part in parts)
    of_stages = Costs(
        forward,
        tuple(sum(costs.backward_us[part]) for part in parts),
        boundary_bytes=10 * size,
        reduce_us=tuple(
            sum(2 * (replicas - 1) * (5 + math.ceil(math.ceil(n / replicas) / 2)) for n in profile.reduced_bytes[part])
            for part in parts
        ),
        recompute_us=(*forward[:-1], None),
    )
    slow = [pair for s in range(2, num_stages, 2) for pair in ((s - 1, s), (s, s - 1))]
    cluster = Cluster((None,) * num_stages, profile.link, tuple((*pair, profile.long_link) for pair in slow))
    num_microbatches = math.ceil(batch_size / replicas / size)
    return simulate(varuna(place(of_stages, cluster), num_microbatches)).makespan_us


def slowest_us(costs: Costs, parts: list[slice]) -> int:
    forward, backward = ([sum(times[part]) for part in parts] for times in (costs.forward_us, costs.backward_us))
    again = [*forward[:-1], 0]
    return max(map(sum, zip(forward, backward, again, strict=True)))


def test_the_choice_is_the_fastest_of_all_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = a_profile()
    profile.save(tmp_path)
    assert Profile.load(tmp_path) == profile
    found = AutoConfig(4, 2, 16, 4, tmp_path)
    assert "3 stages x 1 replicas, 2 per micro-batch: " in capsys.readouterr().out
    by_hand = {}
    for num_stages, replicas in ((1, 4), (2, 2), (3, 1), (4, 1)):
        cuts = [*combinations(range(1, 4), num_stages - 1)]
        best = min(cuts, key=lambda at: slowest_us(profile.costs[1], [slice(*part) for part in pairwise((0, *at, 4))]))
        by_hand |= {(num_stages, size): step_us(profile, num_stages, replicas, size, 16, best) for size in (1, 2, 4)}
    for num_stages in range(1, 5):
        fastest = min(us for (depth, _), us in by_hand.items() if depth == num_stages)
        assert found.batch_times[num_stages] == fastest / 1e6
    num_stages, chunk_size, seconds = found.get_min()
    assert by_hand[num_stages, chunk_size] == min(by_hand.values()) == round(seconds * 1e6)


def test_what_does_not_fit_is_not_chosen(tmp_path: Path) -> None:
    a_profile().save(tmp_path)
    free, tight, none = (
        AutoConfig(4, 4, 16, profile_folder=tmp_path, gpu_memory_capacity=limit, verbose=False)
        for limit in (None, 620, 60)
    )
    assert {*free.batch_times} == {1, 2, 3, 4}
    assert 0 < len(tight.batch_times) < 4
    assert not none.batch_times
    with pytest.raises(SearchError, match="nothing fits into 60 bytes per rank"):
        none.get_min()


def test_a_profile_must_be_whole(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no profile in"):
        AutoConfig(2, 2, 4, profile_folder=tmp_path)
    a_profile().save(tmp_path)
    with pytest.raises(SearchError, match=r"is of \[4\] pieces, not 5"):
        AutoConfig(2, 2, 4, 5, tmp_path)
    (tmp_path / "comm-profile.json").write_text('{"rota": "communication", "reduced_bytes": [], "link": [1]}')
    with pytest.raises(FormatError, match=r"communication\.link is"):
        Profile.load(tmp_path)
    (tmp_path / "comm-profile.json").unlink()
    with pytest.raises(FormatError, match="is incomplete: "):
        Profile.load(tmp_path)
