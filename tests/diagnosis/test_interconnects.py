"""What nvidia-smi prints, and what interconnects are rated for."""

from __future__ import annotations

import subprocess

import pytest

from rota.diagnosis import nvidia_smi
from rota.diagnosis.interconnects import between
from support.fake_machines import FakeCuda


@pytest.mark.parametrize(
    ("way", "capability", "pcie", "name", "gb_per_s"),
    [
        ("NV4", (6, 0), None, "NVLink 1, 4 links", 80),
        ("NV6", (7, 0), None, "NVLink 2, 6 links", 150),
        ("NV12", (8, 0), None, "NVLink 3, 12 links", 300),
        ("NV4", (8, 6), None, "NVLink 3, 4 links", 56.25),
        ("NV18", (9, 0), (5, 16), "NVLink 4, 18 links", 450),
        ("NV18", (10, 0), None, "NVLink 5, 18 links", 900),
        ("NV1", (9, 0), None, "NVLink 4, 1 link", 25),
        ("PIX", (8, 9), (4, 16), "PCIe 4.0 x16, through one PCIe switch", 31.507692),
        ("PHB", (8, 9), (3, 8), "PCIe 3.0 x8, through the CPU's PCIe host bridge", 7.876923),
        ("PXB", (9, 0), (5, 16), "PCIe 5.0 x16, through several PCIe switches", 63.015385),
    ],
)
def test_known_interconnects(
    way: str, capability: tuple[int, int], pcie: tuple[int, int] | None, name: str, gb_per_s: float
) -> None:
    found = between(way, capability, pcie)
    assert found.name == name
    assert found.bytes_per_s == pytest.approx(gb_per_s * 1e9, abs=1000)
    assert found.source
    assert not found.is_upper_bound


@pytest.mark.parametrize(
    ("way", "capability", "pcie", "told"),
    [
        (None, (9, 0), (5, 16), "unknown: nvidia-smi"),
        ("C2C", (9, 0), (5, 16), "unknown: nvidia-smi calls it C2C"),
        ("NV18", (99, 0), None, "of compute capability 99.0: its rate is unknown"),
        ("NV18", None, None, "of different devices: its rate is unknown"),
        ("PIX", (9, 0), None, "PCIe of an unknown generation"),
        ("PIX", (9, 0), (9, 16), "PCIe of an unknown generation"),
    ],
)
def test_what_is_not_known_is_not_guessed(
    way: str | None, capability: tuple[int, int] | None, pcie: tuple[int, int] | None, told: str
) -> None:
    found = between(way, capability, pcie)
    assert told in found.name
    assert found.bytes_per_s is None
    assert not found.source


def test_ways_between_sockets_are_only_bounded() -> None:
    assert between("SYS", (9, 0), (5, 16)).is_upper_bound
    assert between("NODE", (9, 0), (5, 16)).is_upper_bound


# --- nvidia-smi -------------------------------------------------------------------------------------------------------


def test_devices_and_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia_smi.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    found = nvidia_smi.look(FakeCuda(number=3, ways={(0, 2): "SYS"}, pcie=(4, 16, 8), mig="Enabled").run)
    assert [device.index for device in found.devices] == [0, 1, 2]
    assert found.devices[1].name == "NVIDIA H100 80GB HBM3"
    assert found.devices[1].driver == "570.86.15"
    assert found.devices[1].has_mig
    assert (found.devices[1].pcie_generation, found.devices[1].pcie_lanes, found.devices[1].pcie_lanes_now) == (
        4,
        16,
        8,
    )
    assert found.ways == {(0, 1): "NV18", (1, 0): "NV18", (0, 2): "SYS", (2, 0): "SYS", (1, 2): "NV18", (2, 1): "NV18"}


def test_what_is_not_of_the_form_is_left_out() -> None:
    assert nvidia_smi.devices("No devices were found\n") == ()
    (found,) = nvidia_smi.devices("0, GPU-1, NVIDIA GB10, 580.1, [N/A], [N/A], Default, [N/A], [N/A], [N/A], [N/A]\n")
    assert (found.pcie_generation, found.pcie_lanes, found.has_mig) == (None, None, False)
    assert nvidia_smi.ways("") == {}
    assert nvidia_smi.ways("\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n") == {}


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (subprocess.TimeoutExpired("nvidia-smi", 30), "did not answer within 30 s"),
        (PermissionError(13, "Permission denied"), "cannot be run: Permission denied"),
    ],
)
def test_a_tool_that_fails_is_told(error: Exception, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia_smi.shutil, "which", lambda _: "/usr/bin/nvidia-smi")

    def fail(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        raise error

    assert told in nvidia_smi.look(fail).error
    words = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"
    failed = nvidia_smi.look(lambda *_, **__: subprocess.CompletedProcess([], 9, words, ""))
    assert failed.error == f"nvidia-smi failed: {words.strip()}"


def test_without_the_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia_smi.shutil, "which", lambda _: None)
    assert nvidia_smi.look().error == "there is no nvidia-smi"
