"""Which device is this process's, with accelerators that are not there."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import BackendConfig

import rota
from rota import PipelineError
from rota.runtime import json_messages
from rota.runtime.device import local
from rota.runtime.device.known import KNOWN
from rota.runtime.device.local import AUTO, backends_of, device_type, group_backend
from rota.runtime.environment import DEVICE, STORE


class Accelerators:
    """As PyTorch would report them, and the index that was set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str, number: int) -> None:
        self.index: int | None = 0
        device = torch.device(kind) if number else None
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: device)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: number)
        monkeypatch.setattr(torch.accelerator, "set_device_index", self._set)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: self.index)
        local._report_too_few.cache_clear()
        visible = [name for known in KNOWN.values() for name in known.visible]
        for name in (DEVICE, STORE, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", *visible):
            monkeypatch.delenv(name, raising=False)
        self._monkeypatch = monkeypatch

    def _set(self, device: torch.device) -> None:
        self.index = device.index

    def process(self, number: int, of: int) -> None:
        """Be one of the machine's processes."""
        for name, value in (("LOCAL_RANK", number), ("LOCAL_WORLD_SIZE", of), ("RANK", number), ("WORLD_SIZE", of)):
            self._monkeypatch.setenv(name, str(value))


def test_each_process_has_the_device_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Accelerators(monkeypatch, "cuda", 4)
    there.process(2, 3)
    assert rota.local_device() == torch.device("cuda", 2)
    assert there.index == 2
    assert local.current_device("cuda") == torch.device("cuda", 2)
    assert local.current_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("kind", "number", "expected"),
    [("xpu", 1, "xpu:0"), ("cuda", 0, "cpu"), ("mps", 1, "cpu")],  # mps has no messages of its own
)
def test_a_process_that_nobody_started_has_the_first_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str, number: int, expected: str
) -> None:
    Accelerators(monkeypatch, kind, number)
    assert str(rota.local_device()) == expected
    assert capsys.readouterr().err == ""


def test_too_few_are_reported_once_by_the_first_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = Accelerators(monkeypatch, "cuda", 2)
    there.process(1, 4)
    assert rota.local_device() == torch.device("cpu")
    assert capsys.readouterr().err == ""
    there.process(0, 4)
    assert [rota.local_device(), rota.local_device()] == [torch.device("cpu")] * 2
    assert capsys.readouterr().err == (
        "rota: 4 processes on this machine, but 2 cuda devices, so rota.local_device() is the CPU; start 2 here to use "
        "them\n"
    )


@pytest.mark.parametrize(
    ("kind", "variable"),
    [("cuda", "CUDA_VISIBLE_DEVICES"), ("cuda", "ROCR_VISIBLE_DEVICES"), ("xpu", "ZE_AFFINITY_MASK")],
)
def test_a_process_that_is_shown_one_device_has_that(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str, variable: str
) -> None:
    """As by Slurm's --gpus-per-task=1, on which it has number 0; a group takes its tensors."""
    there = Accelerators(monkeypatch, kind, 1)
    there.process(2, 4)
    monkeypatch.setenv(variable, "2")
    for wish in (AUTO, kind):
        monkeypatch.setenv(DEVICE, wish)
        assert str(rota.local_device()) == f"{kind}:0"
    assert group_backend().startswith(f"cpu:gloo,{kind}:")
    monkeypatch.delenv("LOCAL_RANK")
    assert str(rota.local_device()) == f"{kind}:0"
    assert there.index == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setenv(STORE, "a file")  # the ranks of `rota run` share what their supervisor sees
    monkeypatch.setenv(DEVICE, AUTO)
    assert str(rota.local_device()) == "cpu"


def test_a_mesh_takes_the_one_device_that_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself PyTorch would take number LOCAL_RANK, which is not there."""
    there = Accelerators(monkeypatch, "cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: there.index is not None)
    there.index = None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert rota.mesh(pp=1).device_type == "cuda"
    finally:
        dist.destroy_process_group()
    assert there.index == 0


def test_what_rota_run_says_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Accelerators(monkeypatch, "cuda", 2)
    there.process(1, 2)
    for wish, expected in (("cpu", "cpu"), ("cuda", "cuda:1"), ("auto", "cuda:1")):
        monkeypatch.setenv(DEVICE, wish)
        assert str(rota.local_device()) == expected


@pytest.mark.parametrize(
    ("kind", "number", "wish", "told"),
    [
        ("cuda", 2, "cuda", "device 'cuda': 3 processes on this machine, but 2 cuda devices; start 2 here, or run on"),
        ("cuda", 8, "xpu", "device 'xpu': this machine has 8 cuda devices; give cuda, auto or cpu"),
        ("cuda", 8, "cuda:1", "give cuda, auto or cpu (each process takes the one of its number)"),
        ("cuda", 0, "cuda", "device 'cuda': PyTorch finds no accelerator on this machine; give auto or cpu"),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused(
    monkeypatch: pytest.MonkeyPatch, kind: str, number: int, wish: str, told: str
) -> None:
    Accelerators(monkeypatch, kind, number)
    with pytest.raises(PipelineError) as error:
        device_type(wish, 3)
    assert told in str(error.value)


def test_a_process_without_a_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Accelerators(monkeypatch, "cuda", 8)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(PipelineError, match=r"LOCAL_RANK is not set, .* SLURM_LOCALID"):
        rota.local_device()


def test_groups_take_what_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    Accelerators(monkeypatch, "cuda", 2)
    assert group_backend() == "cpu:gloo,cuda:nccl"
    monkeypatch.setenv("ROTA_DEVICE", "cpu")
    assert group_backend() == "gloo"


@pytest.mark.parametrize(
    ("backend", "expected", "of_json"),
    [
        ("gloo", {"cpu": "gloo", "cuda": "gloo"}, "cpu"),
        ("nccl", {"cuda": "nccl"}, "cuda"),
        ("cpu:gloo,xpu:xccl", {"cpu": "gloo", "xpu": "xccl"}, "cpu"),
    ],
)
def test_what_a_group_takes(
    monkeypatch: pytest.MonkeyPatch, backend: str, expected: dict[str, str], of_json: str
) -> None:
    """As PyTorch tells it of a group with these backends, which need not be there."""
    monkeypatch.setattr(dist, "get_backend_config", lambda _: str(BackendConfig(dist.Backend(backend))))
    assert backends_of() == expected
    assert json_messages._device(None) == of_json
