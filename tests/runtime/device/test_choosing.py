"""Whether all ranks' devices go together; what hosts send each other stays on the CPU, whatever the default device."""

import pytest
import torch
from torch import nn

from rota import Pipeline, PipelineError, Stages
from rota.runtime.device.choosing import Placed, describe_placed, device_at, placed_on, refuse_mixed
from rota.runtime.device.protocol import HostDevice
from support.networks import batch_of, chain, loss_fn, plan_for, serial_step
from support.pool import on_ranks


def on_cuda(number: int, host: str = "a", unit: str = "") -> Placed:
    return Placed("cuda", f"cuda:{number}", host, unit or f"{host} {number}")


@pytest.mark.parametrize(
    ("of_ranks", "expected"),
    [
        ([Placed(), Placed()], "cpu"),
        ([Placed("cpu", "cpu"), Placed("cpu", "cpu")], "cpu"),
        ([on_cuda(0), Placed(), on_cuda(1), on_cuda(0, "b")], "cuda"),
        ([Placed("xpu", "xpu:0"), Placed("xpu", "xpu:0")], "xpu"),  # which hardware it is is not known
    ],
)
def test_devices_that_go_together(of_ranks: list[Placed], expected: str) -> None:
    assert refuse_mixed(of_ranks) == expected


@pytest.mark.parametrize(
    ("of_ranks", "told"),
    [
        (
            [Placed("cpu", "cpu"), on_cuda(0), Placed(), on_cuda(1)],
            "devices of different types: those of rank 0 on cpu, those of ranks 1, 3 on cuda; move all: stages.to",
        ),
        (
            [on_cuda(0), on_cuda(1), on_cuda(0)],
            "ranks 0 and 2 both have their stages on cuda:0 of a, but messages go from one device to another (NCCL",
        ),
        ([on_cuda(0), Placed(error="w of stage 1 has no memory")], "rank 1: w of stage 1 has no memory"),
    ],
)
def test_devices_that_do_not_are_refused(of_ranks: list[Placed], told: str) -> None:
    with pytest.raises(PipelineError) as error:
        refuse_mixed(of_ranks)
    assert told in str(error.value)


def test_the_device_of_stages() -> None:
    cpu, meta = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")
    stages = Stages([cpu, nn.Tanh(), meta, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))])
    assert placed_on(stages, [0, 1]) == torch.device("cpu")
    assert placed_on(stages, [1]) is None
    assert isinstance(device_at(torch.device("cpu")), HostDevice)
    assert describe_placed(stages, lambda: [0]).type == "cpu"
    assert describe_placed(stages, lambda: [1]) == Placed()
    for stage in (2, 3):
        assert "has no memory (it is on meta)" in describe_placed(stages, lambda stage=stage: [stage]).error  # type: ignore[misc]


@on_ranks(2)
def test_a_default_device_of_another_type(rank: int) -> None:
    batch = batch_of(4)
    stages = chain(2)
    with torch.device("meta"), Pipeline(stages, plan_for(2), loss_fn) as pipeline:
        losses = [pipeline.step(*batch) for _ in range(2)]
        pipeline.clip_grad_norm_(1.0)
        pipeline.evaluate(*batch)
        pipeline.timeline()
    assert losses[0] == losses[1]
    assert abs(losses[0] - serial_step(chain(2), *batch).loss) < 1e-10
