"""What PyTorch's engine cannot run is refused before a process group is asked for."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rota import Cluster, Costs, Edge, Kind, PipelineError, Placement, Plan, Stages, Task, place, schedules

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.pipelining")

from rota.interop import TorchEngine  # noqa: E402
from rota.interop.refusals import refuse_ragged  # noqa: E402
from rota.interop.torch_schedule import with_whole_backwards  # noqa: E402

IS_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
pytestmark = pytest.mark.skipif(IS_OLD, reason="PyTorch's engine can be used from 2.13 on")


def plan_on(ranks: list[Any], edges: list[tuple[int, int]] | None = None, **costs: Any) -> Plan:
    num_ranks = 1 + max(max(each) if isinstance(each, tuple) else each for each in ranks)
    placement = place(Costs.uniform(len(ranks), edges=edges, **costs), Cluster.uniform(num_ranks), ranks)
    return schedules.gpipe(placement, 2)


def layers(count: int, edges: list[tuple[int, int]] | None = None) -> Stages:
    return Stages([torch.nn.Linear(2, 2) for _ in range(count)], edges)


def loss_fn(output: Any, target: Any) -> Any:
    return (output - target).mean()


JOIN = [(0, 2), (1, 2)]
SKIP = [(0, 1), (1, 2), (0, 2)]


@pytest.mark.parametrize(
    ("stages", "plan", "told"),
    [
        (layers(3, JOIN), plan_on([0, 1, 2], JOIN), "is for a chain, but"),
        (layers(3, SKIP), plan_on([0, 1, 2], SKIP), "is for a chain, but this one also has 0F -> 2F"),
        (layers(3, JOIN), plan_on([0, 1, 2]), "the model lacks the edge 0 -> 1: split it into a chain"),
        (layers(3, SKIP), plan_on([0, 1, 2]), "the model has the edge 0 -> 2: split it into a chain"),
        (layers(2), plan_on([0, (0, 1)]), "has one rank per stage, but stage 1 is on ranks 0, 1"),
        (layers(2), plan_on([0, 1], recompute_us=1), "cannot express 0R: plan without recompute"),
        (layers(3), plan_on([0, 1]), "the plan has 2 stages, the model was split into 3"),
    ],
)
def test_plans(stages: Stages, plan: Plan, told: str) -> None:
    with pytest.raises(PipelineError, match=re.escape(told)) as raised:
        TorchEngine(stages, plan, loss_fn)
    assert "run the plan by Rota's engine" in str(raised.value) or "plan for 3 stages" in str(raised.value)


def test_two_streams() -> None:
    tasks = tuple(Task(stage, kind, (stage,), 1) for stage in (0, 1) for kind in (Kind.F, Kind.B))
    placement = Placement(tasks, (Edge(0, 1), Edge(2, 3)), Cluster.uniform(2))
    plan = schedules.gpipe(placement, 2)
    with pytest.raises(PipelineError, match="this one lacks 0F -> 1F"):
        TorchEngine(layers(2), plan, loss_fn)


def test_shapes_of_the_data() -> None:
    with pytest.raises(PipelineError, match="dynamic_shapes=True, but PyTorch's engine receives into buffers"):
        TorchEngine(layers(2), plan_on([0, 1]), loss_fn, dynamic_shapes=True)
    x, y = torch.zeros(2, 3), torch.zeros(1, 3)
    refuse_ragged([{"x": x, "n": 1}, {"x": x + 1, "n": 2}])
    with pytest.raises(
        PipelineError, match=re.escape("micro-batch 1 has inputs of the shapes [[1, 3]], micro-batch 0")
    ):
        refuse_ragged([(x, None), (y, None)])


def test_old_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.12.1+cpu")
    with pytest.raises(PipelineError, match=r"torch is 2.12.1\+cpu; PyTorch's engine can be used from 2.13 on"):
        TorchEngine(layers(2), plan_on([0, 1]), loss_fn)


PLANNED = ["1F0", "1RECV_B0", "1I0", "1SEND_B0", "1W0", "1REDUCE_GRAD"]


@pytest.mark.parametrize(
    ("at", "cells"),
    [
        ("I and W", "1F0 1RECV_B0 1I0 1SEND_B0 1W0 1REDUCE_GRAD"),
        ("I", "1F0 1RECV_B0 1B0 1SEND_B0 1REDUCE_GRAD"),
        ("W", "1F0 1RECV_B0 1B0 1REDUCE_GRAD"),
    ],
)
def test_whole_backwards_in_place_of_split_ones(at: str, cells: str) -> None:
    assert with_whole_backwards(PLANNED, {1: at}) == cells.split()


@pytest.mark.parametrize("options", [{"recompute": [1]}, {"recompute": "full"}, {"mesh": object()}])
def test_options_of_the_other_engine(options: dict[str, Any]) -> None:
    told = "{}={!r} is not an option of PyTorch's engine here".format(*next(iter(options.items())))
    with pytest.raises(PipelineError, match=re.escape(told)):
        TorchEngine(layers(2), plan_on([0, 1]), loss_fn, **options)


def test_no_process_group() -> None:
    with pytest.raises(PipelineError, match="no process group: start the script with `rota run plan"):
        TorchEngine(layers(2), plan_on([0, 1]), loss_fn)
