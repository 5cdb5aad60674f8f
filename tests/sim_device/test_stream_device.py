"""`StreamDevice` on PyTorch's own streams and events, which drive the simulated device's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rota.core.programs.device_steps import COMPUTE
from rota.runtime.device import streams
from rota.runtime.device.streams import StreamDevice
from support.sim_device import FreedTooEarlyError, SimDevice
from support.sim_device.groups import READ, SIM

MS = 1_000_000


def timed() -> SimDevice:
    """Each kernel takes 3 ms, and the host 1 ms to enqueue it."""
    return SimDevice(cost_ns=lambda name, written: 3 * MS, host_ns=MS)


def test_streams_run_beside_each_other_and_wait_for_events() -> None:
    with timed().checked():
        device = StreamDevice(SIM)
        device.begin()
        beside, compute = device.stream("0→1"), device.stream(COMPUTE)
        assert device.stream("0→1") == beside
        with device.use(beside):
            x = torch.empty(4, device=SIM).fill_(2)
        torch.zeros(4, device=SIM)
        marks = [device.mark_on(beside), device.mark()]
        device.wait(compute, device.record(beside))
        x.add_(1)
        device.wait(beside, marks[1])
        device.keep_for(x, compute)
        beside_ns, compute_ns, both_ns = device.times_ns([*marks, device.mark()])
        assert (compute_ns - beside_ns, both_ns - compute_ns) == (MS, 3 * MS)
        assert x.tolist() == [3, 3, 3, 3]


def test_ops_run_on_the_stream_that_is_current_at_the_beginning_of_a_step(device: SimDevice) -> None:
    queue = StreamDevice(SIM)
    for stream in (torch.accelerator.current_stream(SIM), torch.Stream(SIM)):
        with stream:
            queue.begin()
        assert queue.stream(COMPUTE) == stream


def test_marks_are_on_the_hosts_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one wait per step, so that all times of a step have one origin."""
    with timed().checked() as hardware:
        monkeypatch.setattr(streams, "time", SimpleNamespace(monotonic_ns=lambda: hardware.now_ns))
        device = StreamDevice(SIM)
        for _ in range(3):
            device.begin()
            begun_ns, marks = hardware.now_ns, []
            for _ in range(5):
                torch.zeros(4, device=SIM)
                marks.append(device.mark())
            assert not device.is_done(marks[-1])
            times_ns = device.times_ns(marks[:2]) + device.times_ns(marks[2:])
            assert [time_ns - begun_ns for time_ns in times_ns] == [MS + 3 * MS * i for i in range(1, 6)]
            assert device.is_done(marks[-1])
            assert [sync.operation for sync in hardware.syncs] == ["StreamDevice.times_ns"]
            hardware.syncs.clear()


def test_numbers_go_and_come_without_a_wait(device: SimDevice) -> None:
    queue = StreamDevice(SIM)
    loss = torch.ones(1, device=SIM)
    number = queue.number(loss)
    assert isinstance(number, torch.Tensor)
    loss.zero_()
    read = queue.read(torch.stack([number, *queue.numbers([2, 0.5])]))
    assert device.syncs == []
    assert read() == [1, 2, 0.5]
    assert [sync.operation for sync in device.syncs] == [READ]


def test_both_generators_are_seeded_and_restored(device: SimDevice) -> None:
    queue = StreamDevice(SIM)

    def drawn() -> list[float]:
        return torch.cat([torch.rand(2), torch.rand(2, device=SIM).cpu()]).tolist()

    queue.seed(5)
    state, first, second = queue.random_state(), drawn(), drawn()
    queue.seed(5)
    assert drawn() == first != second
    queue.set_random_state(state)
    assert drawn() == first


def test_the_host_waits_for_all_streams(device: SimDevice) -> None:
    queue = StreamDevice(SIM)
    queue.begin()
    with queue.use(queue.stream("0→1")):
        torch.zeros(4, device=SIM)
        mark = queue.mark()
    assert not queue.is_done(mark)
    queue.synchronize()
    assert queue.is_done(mark)
    assert [sync.operation for sync in device.syncs] == ["synchronize"]


def test_memory_is_kept_for_streams(device: SimDevice) -> None:
    queue = StreamDevice(SIM)
    queue.begin()
    beside = queue.stream("0→1")
    for is_kept in (True, False):
        x = torch.zeros(4, device=SIM)
        queue.wait(beside, queue.mark())
        with queue.use(beside):
            x.sum()
        if is_kept:
            queue.keep_for(x, beside)
        del x
        if is_kept:
            device.check()
    with pytest.raises(FreedTooEarlyError, match="still"):
        device.check()


def test_the_peak_counts_from_its_reset(device: SimDevice) -> None:
    queue = StreamDevice(SIM)
    held = torch.zeros(4, device=SIM)
    del held
    kept = torch.zeros(2, device=SIM)
    assert queue.peak_bytes() == 16
    queue.reset_peak()
    assert queue.peak_bytes() == kept.nbytes == 8
