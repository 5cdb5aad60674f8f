"""The deepspeed door: grids of ranks, cuts of layers, specs and configuration, without processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rota.compat.deepspeed import LayerSpec, TiedLayerSpec
from rota.compat.deepspeed.engine import _num_microbatches, _optimizer, _read, initialize
from rota.compat.deepspeed.layers import _measured_here_us, partition, refuse_unfit
from rota.compat.deepspeed.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from rota.compat.deepspeed.utils import partition_balanced, partition_uniform, prefix_sum_inc
from rota.core.errors import FormatError, SplitError


def test_ranks_count_row_by_row() -> None:
    topology = ProcessTopology(axes=["a", "b", "c"], dims=[2, 3, 4])
    assert topology.world_size() == 24
    assert [topology.get_dim(axis) for axis in "abcd"] == [2, 3, 4, 0]
    assert topology.get_axis_names() == ["a", "b", "c"]
    for rank in range(24):
        coord = topology.get_coord(rank)
        assert coord == topology.ProcessCoord(rank // 12, rank // 4 % 3, rank % 4)
        assert topology.get_rank(**coord._asdict()) == rank
    assert topology.get_coord(rank=5).b == 1


def test_ranks_that_match() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.axes == ["pipe", "data", "model"]
    assert topology.filter_match(pipe=0, data=1) == [2, 3]
    assert topology.filter_match(pipe=1, data=1, model=1) == [7]
    assert topology.filter_match(data=5) == []
    assert topology.get_axis_list(axis="pipe", idx=1) == [4, 5, 6, 7]
    assert topology.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.get_axis_comm_lists("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.get_axis_comm_lists("no such axis") == []
    assert PipeDataParallelTopology(num_pp=3, num_dp=2).dims == [3, 2]


def test_ranks_as_text() -> None:
    topology = ProcessTopology(axes=["a", "b"], dims=[2, 2])
    assert [topology.get_rank_repr(rank) for rank in range(4)] == ["a_00-b_00", "a_00-b_01", "a_01-b_00", "a_01-b_01"]
    assert topology.get_rank_repr(rank=3, inner_sep="+", outer_sep="_x_") == "a+01_x_b+01"
    assert PipeDataParallelTopology(2, 2).get_rank_repr(3) == ""


def test_what_is_not_there_is_told() -> None:
    topology = PipeDataParallelTopology(2, 2)
    for ask, told in (
        (lambda: topology.get_rank(pipe=0), "needs one value for each of"),
        (lambda: topology.get_rank(pipe=0, data=2), "outside of the topology's dims"),
        (lambda: topology.get_coord(4), "rank 4 is not in the topology: it has 0 to 3"),
        (lambda: topology.filter_match(model=0), "no axis 'model'; it has"),
    ):
        with pytest.raises(ValueError, match=told):
            ask()


@pytest.mark.parametrize(
    ("weights", "num_parts", "boundaries"),
    [
        ([1, 1], 4, [0, 1, 2, 2, 2]),
        ([0, 1, 2, 3, 3, 3], 4, [0, 3, 4, 5, 6]),
        ([0.0, 1.1, 1.9, 3.0, 30.0], 2, [0, 4, 5]),
    ],
)
def test_balanced_parts(weights: list[float], num_parts: int, boundaries: list[int]) -> None:
    assert partition_balanced(weights, num_parts) == boundaries


def test_uniform_parts_and_sums() -> None:
    assert partition_uniform(8, 4) == [0, 2, 4, 6, 8]
    assert partition_uniform(num_items=2, num_parts=4) == [0, 1, 2, 2, 2]
    assert partition_uniform(7, 3) == [0, 3, 5, 7]
    assert prefix_sum_inc([3, 4, 5]) == [3, 7, 12]


LAYERS: list[Any] = [
    LayerSpec(nn.Embedding, 10, 4),  # 40 parameters
    LayerSpec(nn.Linear, 4, 4),  # 20
    torch.relu,
    nn.Linear(4, 4),
    LayerSpec(nn.LayerNorm, 4),  # 8
    nn.Linear(4, 10).requires_grad_(False),  # none to train
]


@pytest.mark.parametrize(
    ("method", "boundaries"),
    [
        ("uniform", [0, 2, 4, 6]),
        ("parameters", [0, 1, 3, 6]),
        ("type:linear", [0, 3, 5, 6]),
        ("type:relu", [0, 6, 6, 6]),
    ],
)
def test_methods_of_partition(method: str, boundaries: list[int]) -> None:
    state = torch.get_rng_state()
    assert partition(LAYERS, method, 3, None) == boundaries
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("type:Conv", "matches none of the layers, which are Embedding, Linear, relu, LayerNorm"),
        ("best", "partition_method is 'best': give 'parameters', 'uniform'"),
        ("profile", "give profile_input, a micro-batch's inputs"),
    ],
)
def test_methods_that_do_not_work(method: str, told: str) -> None:
    with pytest.raises(SplitError) as error:
        partition(LAYERS, method, 3, None)
    assert told in str(error.value)


def test_measuring_leaves_the_layers_as_they_are() -> None:
    layers = [nn.Linear(4, 4), torch.relu, nn.BatchNorm1d(4), TiedLayerSpec("one", nn.Linear, 4, 4)]
    state, statistics = torch.get_rng_state(), layers[2].running_mean.clone()
    measured = _measured_here_us(layers, torch.ones(8, 4))
    assert len(measured) == 4
    assert min(measured) >= 0
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(statistics, layers[2].running_mean)
    assert layers[0].weight.grad is None


def test_specs() -> None:
    spec = LayerSpec(nn.Linear, 2, 3, bias=False)
    assert repr(spec) == "Linear(2, 3, bias=False)"
    assert spec.build().weight.shape == (3, 2)  # type: ignore[union-attr]
    tied = TiedLayerSpec("embed", nn.Embedding, 5, 2, forward_fn=None, tied_weight_attr=["weight"])
    assert (tied.key, tied.tied_weight_attr, repr(tied)) == ("embed", ["weight"], "Embedding(5, 2)")


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (lambda: LayerSpec(torch.relu, 1), "give a subclass of torch.nn.Module, or the layer itself"),  # type: ignore[arg-type]
        (lambda: refuse_unfit([nn.ReLU(), 3]), r"layers\[1\] is 3: give a module, a LayerSpec or a function"),  # type: ignore[list-item]
        (
            lambda: refuse_unfit([TiedLayerSpec("e", nn.Embedding, 5, 2), TiedLayerSpec("e", nn.Linear, 2, 5)]),
            r"layers\[1\] is Linear\(2, 5\), but shares the key 'e' with Embedding\(5, 2\); make them equal",
        ),
        (lambda: TiedLayerSpec("e", nn.Linear, 2, 5, tied_weight_attr="w").build(), "tied_weight_attr is 'w', but"),
    ],
)
def test_specs_that_do_not_fit(use: Any, told: str) -> None:
    with pytest.raises(SplitError, match=told):
        use()


@pytest.mark.parametrize(
    ("config", "num_microbatches"),
    [
        ({}, 1),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, 4),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8}, 8),
    ],
)
def test_number_of_microbatches(config: dict[str, Any], num_microbatches: int) -> None:
    assert _num_microbatches(config, 2) == num_microbatches


@pytest.mark.parametrize("steps", [{}, {"gradient_accumulation_steps": 3}])
def test_sizes_that_contradict(steps: dict[str, int]) -> None:
    with pytest.raises(FormatError, match="train_batch_size 30 is not train_micro_batch_size_per_gpu 4 x"):
        _num_microbatches({"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4} | steps, 2)


def test_configuration_that_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    for use, told in (
        (lambda: initialize(), "initialize got no model"),
        (lambda: initialize(model=nn.Linear(1, 1), config={"fp16": {"enabled": True}}), "config has 'fp16', which"),
        (lambda: _read(str(tmp_path / "none.json")), "cannot read"),
        (lambda: _read(str(tmp_path / "list.json")), "holds a list; give a JSON object"),
        (lambda: _optimizer({"type": "Magic"}, [nn.Parameter(torch.zeros(1))]), "'Magic' is not in torch.optim"),
    ):
        with pytest.raises(FormatError, match=told):
            use()
