"""An accelerator's clock as the host's, on a fake accelerator: events that know when they were reached."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rota.runtime.device.streams import StreamDevice

MS = 1_000_000


class FakeAccelerator:
    """Its clock starts anywhere; the host's goes on only where the test says so."""

    def __init__(self) -> None:
        self.host_ns, self.ahead_ns, self.num_waits = 5_000 * MS, 77_777 * MS, 0

    @property
    def device_ns(self) -> int:
        return self.host_ns + self.ahead_ns


class FakeEvent:
    hardware: FakeAccelerator

    def __init__(self, device: Any = None, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at_ns = 0

    def record(self, stream: Any) -> None:
        assert stream == "the caller's stream"
        self.at_ns = self.hardware.device_ns

    def synchronize(self) -> None:
        self.hardware.num_waits += 1
        self.hardware.host_ns += 8_000  # the host wakes up

    def elapsed_time(self, later: FakeEvent) -> float:
        return (later.at_ns - self.at_ns) / 1e6


@pytest.fixture
def hardware(monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
    hardware = FakeEvent.hardware = FakeAccelerator()
    monkeypatch.setattr(torch, "Event", FakeEvent)
    monkeypatch.setattr(torch, "get_device_module", lambda _: None)
    monkeypatch.setattr(dist, "get_default_backend_for_device", lambda _: "nccl")
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: "the caller's stream")
    monkeypatch.setattr(time, "monotonic_ns", lambda: hardware.host_ns)
    return hardware


def step(device: StreamDevice, hardware: FakeAccelerator) -> tuple[list[int], list[int]]:
    """Times of marks, and the host's times at which the device has reached them."""
    device.begin()
    marks, reached_ns = [], []
    for _ in range(5):
        hardware.host_ns += 3 * MS
        marks.append(device.mark())
        reached_ns.append(hardware.host_ns)
    hardware.host_ns += MS
    return device.times_ns(marks[:2]) + device.times_ns(marks[2:]), reached_ns


def test_marks_are_on_the_hosts_clock(hardware: FakeAccelerator) -> None:
    device = StreamDevice(torch.device("cuda", 0))
    assert device.backend == "nccl"
    for _ in range(3):
        found, reached_ns = step(device, hardware)
        assert [at - before for at, before in zip(found, reached_ns, strict=True)] == [8_000] * 5  # late by the wake-up
        assert hardware.num_waits == 1, "one wait per step, so that all its times have one origin"
        hardware.num_waits = 0
