"""Profiles and links of simulated devices whose kernels have known costs: those are found, and no host waits inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from profiling.test_profile import TwoLayers
from rota import Cluster, PipelineError, Stages
from rota.profiling import clocks, links
from rota.profiling.clocks import DeviceClock, Spinner, launch_text
from rota.profiling.links import measure_links
from rota.runtime.device.streams import StreamDevice
from support.networks import loss_fn
from support.pool import Pool
from support.profiles import profile, profile_layers
from support.sim_device import Block, SimDevice
from support.sim_device.groups import SIM


def timed(cost_ns: Callable[[str, Sequence[Block]], int]) -> SimDevice:
    """A device whose kernels last; its host takes 20 µs to enqueue one."""
    return SimDevice(cost_ns=cost_ns, host_ns=20_000)


def costing(us: float) -> Callable[[str, Sequence[Block]], int]:
    return lambda name, written: round(1000 * us)


def spun_us(device: StreamDevice, spinner: Spinner, us: float) -> float:
    """What the kernels take that keep the device busy for `us`."""
    device.begin()
    spinner.spin(10_000)
    marks = [device.mark()]
    spinner.spin(us)
    marks.append(device.mark())
    start_ns, end_ns = device.times_ns(marks)
    return (end_ns - start_ns) / 1000


def test_kernels_that_spin_are_calibrated() -> None:
    """Also where there is no kernel of ticks: each takes 2 µs to start and 1 ns for each byte that it writes."""

    def cost_ns(name: str, written: Sequence[Block]) -> int:
        return 2_000 + sum(block.num_bytes for block in written)

    with timed(cost_ns).active():
        device = StreamDevice(SIM)
        for spinner, resolution_us in ((Spinner(device), 40), (Spinner(device, clocks._chain(SIM)), 1100)):
            for us in (3000, 8000):
                assert spun_us(device, spinner, us) == pytest.approx(us, abs=resolution_us)
            assert spun_us(device, spinner, 0) == 0


def kernels(*counts: int) -> Callable[[Callable[[], None]], None]:
    """Parts of so many kernels each."""
    x = torch.zeros(4, device="sim")

    def run(mark: Callable[[], None]) -> None:
        mark()
        for count in counts:
            for _ in range(count):
                x.add_(1)
            mark()

    return run


def test_parts_take_what_their_kernels_cost() -> None:
    hardware = timed(costing(30_000))
    with hardware.active():
        clock = DeviceClock(StreamDevice(SIM))
        run = kernels(3, 0, 5)
        hardware.syncs.clear()
        laps = clock.timed(run, 3, 0, together=True)
        assert laps.us == pytest.approx([90_000, 0, 150_000], abs=0.01)
        assert laps.spread < 0.001
        assert {sync.operation for sync in hardware.syncs} == {"StreamDevice.times_ns"}
        assert launch_text("FRB", laps) == ""


def test_launches_that_take_longer_than_kernels_are_told_and_left_out_of_their_times() -> None:
    with timed(costing(1)).active():
        laps = DeviceClock(StreamDevice(SIM)).timed(kernels(4, 20), 3, 0, together=True)
        assert laps.us == pytest.approx([4, 20], abs=0.01)
        assert min(laps.host_us) > 20
        assert not any(laps.starved)
        assert "B takes the host " in launch_text("FB", laps)
        assert launch_text("FB", laps).endswith("20 µs to run")


def test_a_host_that_cannot_keep_ahead_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "_LONGEST_HEAD_START_US", 0.0)
    monkeypatch.setattr(Spinner, "spin", lambda spinner, us: None)
    with SimDevice(cost_ns=costing(1), host_ns=2_000).active():
        laps = DeviceClock(StreamDevice(SIM)).timed(kernels(20), 3, 0, together=True)
        assert laps.us == pytest.approx([20 * 2], abs=2)  # the host's time
        assert laps.starved == [True]
        assert launch_text("F", laps).endswith("to enqueue, the device waits for it")


def inside_timed_parts(hardware: SimDevice, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where the host waits in the timed bursts: fills up while a profile is made."""
    waits: list[str] = []
    burst = DeviceClock._burst

    def watched(*arguments: object) -> object:
        before = len(hardware.syncs)
        result = burst(*arguments)  # type: ignore[arg-type]
        waits.extend(f"{sync.operation} at {sync.where}" for sync in hardware.syncs[before:])
        return result

    monkeypatch.setattr(DeviceClock, "_burst", watched)
    return waits


BYTES = ("activation_bytes", "input_frees_bytes", "boundary_bytes", "gradient_bytes", "static_bytes", "edges")


def test_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rota.profiling.stage_profile._RUN_NS", 0)
    stages, messages = Stages([TwoLayers(), TwoLayers()]), list[str]()
    x, adam = torch.zeros(5, 8), torch.optim.Adam
    hardware = timed(costing(100_000))
    with hardware.active():
        on_cpu = profile(
            stages, x, x, loss_fn, split_backward=True, optimizer=adam, recompute=[1], repeats=1, here=True
        )
        for module in stages.modules:
            module.to("sim")
        syncs = inside_timed_parts(hardware, monkeypatch)
        costs = profile(
            stages, x, x, loss_fn, split_backward=True, optimizer=adam, repeats=2, recompute=[1], report=messages.append
        )
    hardware.check()
    assert {sync.partition(" ")[0] for sync in syncs} == {"StreamDevice.times_ns"}, syncs
    for name in BYTES:
        assert getattr(costs, name) == getattr(on_cpu, name), name
    assert messages[0] == "measuring 2 stages on sim, one after another"
    assert costs.note.startswith("measured on sim, one stage after another")
    kernels_of = [us / 100_000 for us in (*costs.forward_us, *costs.backward_us)]
    assert all(count >= 2 and count == round(count) for count in kernels_of if count), kernels_of
    assert costs.recompute_us is not None
    assert costs.recompute_us[0] is None
    assert costs.recompute_us[1] == costs.forward_us[1]
    assert min(costs.forward_peak_bytes) >= 0
    assert all(parameter.grad is None for _, parameter in stages.named_parameters())


def test_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rota.profiling.layer_measurement._RUN_NS", 0)
    model, messages = nn.Sequential(TwoLayers(), nn.BatchNorm1d(8), TwoLayers()), list[str]()
    x = torch.zeros(5, 8)
    hardware = timed(costing(3))
    with hardware.active():
        on_cpu = profile_layers(model, x, x, loss_fn, repeats=1)
        syncs = inside_timed_parts(hardware, monkeypatch)
        layers = profile_layers(model.to("sim"), x.to("sim"), x.to("sim"), loss_fn, repeats=2, report=messages.append)
    hardware.check()
    assert {sync.partition(" ")[0] for sync in syncs} == {"StreamDevice.times_ns"}, syncs
    for name in ("kept_bytes", "waiting_bytes", "boundary_bytes", "parameter_bytes", "changed_bytes"):
        assert getattr(layers, name) == getattr(on_cpu, name), name
    assert layers.note == "measured on sim, one layer after another"
    assert all(us % 3 == 0 for us in layers.forward_us + layers.backward_us)
    assert "F takes the host" in messages[0]
    assert "to enqueue, " in messages[0]


def link_cost_ns(name: str, written: Sequence[Any]) -> int:
    """Messages at 1 GB/s after 30 µs, on the side that receives; matrix products of 100 µs."""
    if "recv" in name:
        return 30_000 + sum(block.num_bytes for block in written)
    return 100_000 if "mm" in name else 0


def measured(rank: int) -> Cluster:
    """The links of simulated devices."""
    device = SimDevice(f"rank {rank}", cost_ns=link_cost_ns, host_ns=20_000)
    with device.checked(), mock.patch.object(links, "_PACE_NS", 1):
        return measure_links(1, device=SIM).cluster


@pytest.mark.dist
def test_links_between_devices_are_those_of_their_kernels(pool: Pool) -> None:
    first, *others = pool.run(2, measured)
    assert others == [first]
    assert first.all_reduces == ()
    assert first.link.latency_us == pytest.approx(30, abs=30)
    assert first.link.bytes_per_us == pytest.approx(1000, rel=0.1)
    (shared,) = first.shared
    assert shared.senders == shared.receivers == (0, 1)


def on_cpu_and_sim(rank: int) -> Any:
    with SimDevice().active():
        try:
            measure_links(device=SIM if rank else None)
        except PipelineError as error:
            return str(error)


@pytest.mark.dist
def test_mixed_devices_are_refused(pool: Pool) -> None:
    refusal = "measured between devices of one type, but there are process 0 on cpu, process 1 on sim; "
    assert all(refusal in error for error in pool.run(2, on_cpu_and_sim))
