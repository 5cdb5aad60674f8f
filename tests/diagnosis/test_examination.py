"""Whole reports about machines that are not here: PyTorch, nvidia-smi and ranks say what they would say there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from rota.diagnosis import Finding, Report, Wanted, accelerators, examine, host, nvidia_smi, software
from rota.diagnosis.accelerators import Accelerators
from support import ROOT
from support.fake_machines import GB, FakeCuda, FakeRanks
from support.json_schema import violations

SCHEMA = json.loads((ROOT / "docs/doctor.schema.json").read_text())
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")

Examined = Callable[..., Report]


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> Examined:
    """Examines a fake machine; every report must follow the schema."""
    for name in _HIDING:
        monkeypatch.delenv(name, raising=False)

    def report_of(cuda: FakeCuda, ranks: FakeRanks | None = None, **wanted: Any) -> Report:
        cuda.install(monkeypatch)
        (ranks or FakeRanks()).install(monkeypatch)
        report = examine(Wanted(**wanted))
        assert [*violations(json.loads(report.to_json()), SCHEMA)] == []
        return report

    return report_of


def about(report: Report, name: str, section: str = "") -> Finding:
    (found,) = (each for each in report.findings if each.about == name and each.section.startswith(section))
    return found


def levels(report: Report, section: str) -> set[str]:
    return {finding.level for finding in report.findings if finding.section.startswith(section)}


def test_eight_devices_that_are_all_right(examined: Examined) -> None:
    ranks = FakeRanks(rates={(0, 3): 350.0})
    report = examined(FakeCuda(), ranks)
    assert ranks.asked == [(8, "cuda")]
    assert levels(report, "accelerators") == levels(report, "links") == levels(report, "self-test") == {"ok"}
    assert about(report, "CUDA").text == "12.8, which PyTorch was built with"
    assert about(report, "driver").text == "570.86.15"
    assert about(report, "NCCL").text == "2.27.3"
    assert about(report, "rank 7").text == "cuda:7, NVIDIA H100 80GB HBM3, 84.5 GB of 85 GB free"
    assert about(report, "peer access").text == "both ways, in 28 of 28 pairs of devices"
    text = "343 GB/s (0-3) to 363 GB/s of 450 GB/s, 14 µs to 14 µs, NVLink 4, 18 links"
    assert about(report, "28 pairs").text == text
    assert about(report, "dualpipe, 8 ranks").level == "ok"
    link = report.facts["links"][0]
    assert link["interconnect"]["bytes_per_s"] == 450 * GB
    assert link["message_bytes"][-1] == 256_000_000
    assert report.facts["accelerators"][0]["peers"] == [1, 2, 3, 4, 5, 6, 7]


def test_what_is_wrong_with_devices(examined: Examined) -> None:
    cuda = FakeCuda(number=4, free_bytes={1: 30 * GB}, names={2: "NVIDIA H100 PCIe"}, without_peers=frozenset({(3, 0)}))
    report = examined(cuda)
    assert about(report, "rank 0").level == "ok"
    assert "30 GB of 85 GB free: other programs hold memory" in about(report, "rank 1").text
    assert "ranks have different ones: NVIDIA H100 80GB HBM3, NVIDIA H100 PCIe" in about(report, "devices").text
    assert about(report, "peer access").text == "1 of 6 pairs have none: 0-3"
    assert levels(report, "accelerators") == {"ok", "warning"}
    assert report.exit_code == 0


@pytest.mark.parametrize(
    ("cuda", "level", "told"),
    [
        (FakeCuda(2, compute_mode="Prohibited"), "problem", "its compute mode is Prohibited"),
        (FakeCuda(2, mig="Enabled"), "warning", "it is divided into slices (MIG)"),
        (FakeCuda(2, pcie=(4, 16, 4)), "warning", "PCIe runs on 4 of 16 lanes"),
        (FakeCuda(2, capability=(10, 3)), "problem", "no kernels for compute capability 10.3"),
        (FakeCuda(2, architectures=("sm_80", "sm_90a")), "ok", "84.5 GB of 85 GB free"),
        (FakeCuda(2, capability=(8, 6)), "ok", "84.5 GB of 85 GB free"),
        (FakeCuda(2, capability=(7, 5)), "problem", "no kernels for compute capability 7.5"),
        (FakeCuda(2, capability=(13, 0)), "ok", "84.5 GB of 85 GB free"),  # from compute_120's PTX
        (FakeCuda(2, broken={0: "CUDA error: uncorrectable ECC error\nmore"}), "problem", "uncorrectable ECC error"),
    ],
)
def test_a_device(cuda: FakeCuda, level: str, told: str, examined: Examined) -> None:
    ranks = FakeRanks()
    report = examined(cuda, ranks)
    found = about(report, "rank 0")
    assert found.level == level
    assert told in found.text
    assert "\n" not in found.text
    assert bool(ranks.asked) == (level != "problem")  # ranks would only fail by it again
    assert report.exit_code == (level == "problem")


def test_more_ranks_than_devices_are_a_problem(examined: Examined) -> None:
    ranks = FakeRanks()
    report = examined(FakeCuda(number=2), ranks, num_ranks=4)
    assert about(report, "ranks", "accelerators").text == "4 ranks for 2 devices"
    assert about(report, "links, clocks, self-test").level == "skipped"
    assert ranks.asked == []
    assert report.exit_code == 1


def test_fewer_ranks_leave_devices_out(examined: Examined) -> None:
    ranks = FakeRanks()
    report = examined(FakeCuda(number=4), ranks, num_ranks=2)
    assert ranks.asked == [(2, "cuda")]
    assert {each.about for each in report.findings if each.section == "accelerators"} >= {"rank 1", "no rank"}


def test_on_one_device_messages_are_tried_on_the_cpu(examined: Examined) -> None:
    ranks = FakeRanks()
    report = examined(FakeCuda(number=1), ranks)
    assert ranks.asked == [(1, "cuda"), (2, "cpu")]
    assert about(report, "peer access").level == "skipped"
    assert about(report, "messages, clocks", "links and clocks, on cuda").level == "skipped"
    assert "Gloo on the host" in about(report, "0-1", "links and clocks, on the CPU").text
    assert {each["on"] for each in report.facts["self_test"]} == {"cuda", "cpu"}


def test_what_no_even_number_of_ranks_runs_is_run_on_one_less(examined: Examined) -> None:
    ranks = FakeRanks()
    report = examined(FakeCuda(number=5), ranks)
    assert ranks.asked == [(5, "cuda"), (4, "cuda")]
    assert about(report, "1f1b, 5 ranks").level == about(report, "dualpipe, 4 ranks").level == "ok"


def test_slow_and_changed_links(examined: Examined) -> None:
    ways = {(0, 1): "NV18", (0, 2): "NV18", (0, 3): "SYS", (1, 2): "PIX", (1, 3): "PIX", (2, 3): "C2C"}
    rates = {(0, 1): 12.0, (0, 2): 300.0, (0, 3): 9.0, (1, 2): 50.0, (1, 3): 60.0, (2, 3): 5.0}
    report = examined(FakeCuda(number=4, ways=ways), FakeRanks(rates=rates, changed=frozenset({(1, 3)})))
    of = {(each.about, each.level): each.text for each in report.findings if each.section.startswith("links")}
    assert of["0-1", "warning"].endswith("NVLink 4, 18 links: less than 25% of what it is rated for")
    assert "of 450 GB/s" in of["0-2", "ok"]
    assert "of at most 63 GB/s" in of["0-3", "ok"]  # the sockets' interconnect may be the slower part of the way
    assert "PCIe 5.0 x16, through one PCIe switch" in of["1-2", "ok"]
    assert of["1-3", "problem"] == "ranks 1 and 3: bytes that were sent there and back have changed"
    assert "unknown: nvidia-smi calls it C2C" in of["2-3", "ok"]
    assert report.exit_code == 1


def test_one_pair_that_is_slower_than_others(examined: Examined) -> None:
    report = examined(FakeCuda(number=4, way="SYS"), FakeRanks(rate=20.0, rates={(1, 2): 2.0}))
    assert about(report, "1-2").level == "warning"
    assert "less than 25% of other pairs, 20 GB/s" in about(report, "1-2").text
    assert about(report, "0-1").level == "ok"


def test_devices_are_found_by_uuid_where_nvidia_smi_counts_otherwise(examined: Examined) -> None:
    cuda = FakeCuda(number=3, order=(2, 0, 1), way="PIX", ways={(0, 1): "NV18"})  # of nvidia-smi's numbers
    report = examined(cuda, FakeRanks(rate=40.0))
    names = {tuple(link["ranks"]): link["interconnect"]["name"] for link in report.facts["links"]}
    assert names[1, 2] == "NVLink 4, 18 links"
    assert names[0, 1] == names[0, 2] == "PCIe 5.0 x16, through one PCIe switch"


def test_of_many_ranks_neighbours_alone_are_measured(examined: Examined) -> None:
    assert len(examined(FakeCuda(number=16)).facts["links"]) == 120
    report = examined(FakeCuda(number=17))
    assert [link["ranks"] for link in report.facts["links"]] == [*([r, r + 1] for r in range(16)), [0, 16]]
    assert about(report, "other pairs").level == "skipped"


def test_clocks(examined: Examined) -> None:
    assert about(examined(FakeCuda(2)), "clock").text == (
        "all ranks share one; asked by messages, they see offsets of up to 3.0 µs, which vary by 9.0 µs"
    )
    assert about(examined(FakeCuda(2), FakeRanks(offset_ns=5_000_000)), "clock").level == "warning"
    apart = FakeRanks(shared=False, offset_ns=9_000_000_000, spread_ns=20_000)
    assert about(examined(FakeCuda(2), apart), "clock").level == "ok"  # timelines correct offsets
    drifting = FakeRanks(shared=False, offset_ns=9_000_000_000, spread_ns=4_000_000)
    assert "vary by 4 ms" in about(examined(FakeCuda(2), drifting), "clock").text
    assert about(examined(FakeCuda(2), drifting), "clock").level == "warning"


def test_the_self_tests_verdicts(examined: Examined) -> None:
    ranks = FakeRanks(
        failing={"zb_h1": "rank 1: the loss is nan", "links": "the run hung (rank 1 never answered)"},
        late=frozenset({"dualpipe"}),
        differences={"interleaved_1f1b": 2e-10, "1f1b": 0.0},
        torches=("2.13.0", "2.12.1"),
    )
    report = examined(FakeCuda(2), ranks)
    assert "to the last bit" in about(report, "1f1b, 2 ranks").text
    found = about(report, "interleaved_1f1b, 2 ranks")
    assert (found.level, "off by 2.0e-10" in found.text) == ("problem", True)
    assert "rank 1: the loss is nan" in about(report, "zb_h1, 2 ranks").text
    assert about(report, "dualpipe, 2 ranks").level == "skipped"
    assert about(report, "messages").text == "the run hung (rank 1 never answered)"
    assert "NCCL_P2P_DISABLE=1" in about(report, "messages").remedy
    assert "2.13.0, 2.12.1" in about(report, "PyTorch", "links").text
    verdicts = {each["family"]: each["verdict"] for each in report.facts["self_test"]}
    assert verdicts == {"1f1b": "ok", "interleaved_1f1b": "problem", "zb_h1": "problem", "dualpipe": "skipped"}


def test_a_gradient_that_is_missing_is_null_in_the_json(examined: Examined) -> None:
    report = examined(FakeCuda(2), FakeRanks(differences={"1f1b": float("inf")}))
    assert "missing or not finite" in about(report, "1f1b, 2 ranks").text
    assert report.facts["self_test"][0]["difference"] is None


def test_a_full_examination_runs_every_schedule_and_size(examined: Examined) -> None:
    ranks = FakeRanks()
    report = examined(FakeCuda(number=4), ranks, full=True)
    assert ranks.asked == [(4, "cuda"), (3, "cuda"), (2, "cuda")]
    cases = report.facts["self_test"]
    assert {each["family"] for each in cases if each["num_ranks"] == 4} >= {"gpipe", "zb_v", "chimera", "varuna"}
    sizes = {each["message_bytes"] for each in cases if each["num_ranks"] == 4}
    assert {1_000, 64_000_000} <= sizes
    assert {1_000, 4_000_000, 256_000_000} <= {*report.facts["links"][0]["message_bytes"]}


def test_cases_that_do_not_fit_into_memory_are_skipped(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    here = host.look()
    monkeypatch.setattr(host, "look", lambda: replace(here, available_bytes=GB))
    report = examined(FakeCuda(number=2), full=True)
    skipped = {each["message_bytes"] for each in report.facts["self_test"] if each["verdict"] == "skipped"}
    assert max(skipped) == 64_000_000
    assert 1_000 not in skipped


def test_without_a_self_test(examined: Examined) -> None:
    report = examined(FakeCuda(2), self_test=False)
    assert report.facts["self_test"] == []
    assert about(report, "plans").text == "--no-self-test was given"


# --- machines on which PyTorch sees no device -------------------------------------------------------------------------


def test_a_driver_that_pytorch_cannot_use(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)."
    FakeCuda().install(monkeypatch)
    monkeypatch.setattr(accelerators, "look", lambda: Accelerators("cpu", error=words))
    found = accelerators.judge(accelerators.look(), nvidia_smi.look(), 2, {}).findings
    assert (found[0].level, found[0].text) == ("problem", f"PyTorch sees none: {words}")


def test_devices_that_pytorch_does_not_see(examined: Examined) -> None:
    cuda = FakeCuda(number=2)
    cuda_driver = cuda.query()
    cuda.number = 0
    cuda.query = lambda: cuda_driver  # type: ignore[method-assign]
    ranks = FakeRanks()
    report = examined(cuda, ranks)
    assert about(report, "devices").text == "PyTorch sees none: though nvidia-smi lists 2"
    assert report.exit_code == 1
    assert ranks.asked[0][1] == "cpu"  # its CPU part


def test_devices_that_the_environment_hides(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cuda = FakeCuda(number=0)
    cuda.install(monkeypatch)
    found = accelerators.judge(accelerators.look(), nvidia_smi.look(), 2, {"CUDA_VISIBLE_DEVICES": ""}).findings
    assert (found[0].level, found[0].remedy) == ("warning", "unset CUDA_VISIBLE_DEVICES")


def test_visible_devices_that_do_not_exist(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(number=2).install(monkeypatch)
    section = accelerators.judge(accelerators.look(), nvidia_smi.look(), 2, {"CUDA_VISIBLE_DEVICES": "0,1,7"})
    (found,) = (each for each in section.findings if each.level == "warning")
    assert found.text == "CUDA_VISIBLE_DEVICES=0,1,7 names 3, but PyTorch sees 2"


def test_a_cpu_build_on_a_machine_with_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(number=2).install(monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", None)
    installed = software.Software()
    facts = installed.facts(nvidia_smi.look())
    found = {each.about: each for each in software.judge(installed, facts, nvidia_smi.look()).findings}
    assert found["CUDA"].level == "warning"
    assert "CPU build, but the machine has NVIDIA H100" in found["CUDA"].text


def test_asking_for_devices_in_another_process() -> None:
    """The way that is taken where PyTorch was built for devices: the answer is that of this process."""
    assert accelerators.look_apart() == accelerators.look()
    there = Accelerators("cuda", (accelerators.Accelerator("a", 2, 1, (9, 0), "u"),), frozenset({(0, 1)}), ("sm_90",))
    assert Accelerators.from_json(there.to_json()) == there


# --- PyTorch ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ModuleNotFoundError("No module named 'torch'"), "it is not installed"),
        (OSError("libcudart.so.12: cannot open shared object file"), "cannot be imported: OSError: libcudart.so.12"),
    ],
)
def test_without_pytorch(error: Exception, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> ModuleType:
        raise error

    monkeypatch.setattr(software.importlib, "import_module", fail)
    report = examine(Wanted())
    assert about(report, "PyTorch").level == "problem"
    assert told in about(report, "PyTorch").text
    assert "pip install 'rota[torch]'" in about(report, "PyTorch").remedy
    assert about(report, "links, clocks, self-test").text == "there is no PyTorch"
    assert [*violations(json.loads(report.to_json()), SCHEMA)] == []
    assert report.exit_code == 1


@pytest.mark.parametrize(
    ("version", "level"), [("2.9.1", "problem"), ("2.10.0+cu128", "ok"), ("2.13.1", "ok"), ("2.14.0.dev1", "warning")]
)
def test_versions_of_pytorch(version: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = ["numpy>=2; extra == 'search'", "torch<2.14,>=2.10; extra == 'torch'", "torch-geometric>=9"]
    monkeypatch.setattr(software.importlib.metadata, "requires", lambda _: ranges)
    installed = software.Software()
    assert isinstance(installed.torch, ModuleType)
    facts = {**installed.facts(nvidia_smi.look()), "torch": version}
    found = {each.about: each for each in software.judge(installed, facts, nvidia_smi.look()).findings}
    assert found["PyTorch"].level == level
