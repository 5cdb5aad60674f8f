"""The jobs of the tests on accelerators, on simulated devices: they do what they should, and have no race."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from support.gpu import exactness, measuring
from support.pool import Pool
from support.sim_device import SimDevice
from support.sim_device.runtime_device import SIM, syncs_inside_steps

pytestmark = [pytest.mark.dist, pytest.mark.sweep]


def on_sim(rank: int, job: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
    """What the job returns, and where the host has waited for the device, in the whole job."""
    with SimDevice(f"rank {rank}").checked():
        return job(rank, SIM, *args), syncs_inside_steps()


def run(pool: Pool, num_ranks: int, job: Callable[..., Any], *args: Any) -> list[Any]:
    return [result for result, _ in pool.run(num_ranks, on_sim, job, *args)]


def test_a_wrong_gradient_is_noticed(pool: Pool) -> None:
    """One weight of the pipeline is a little larger."""
    (found,) = run(pool, 1, with_a_wrong_weight)
    assert found > 1e-5


def with_a_wrong_weight(rank: int, device: torch.device) -> float:
    plan = exactness.named("1f1b", 1)

    def change(stages: Any) -> None:
        with torch.no_grad():
            stages[1].norm.weight[0] += 1e-3

    make = lambda: exactness.blocks(plan.num_stages, torch.float64)  # noqa: E731
    return exactness.compared(device, plan, make, torch.float64, change=change)


def test_precision(pool: Pool) -> None:
    assert max(run(pool, 2, exactness.autocast, 2, "bfloat16")) <= 1e-2
    for difference, scales, expected in run(pool, 2, exactness.scaler, 2):
        assert difference <= 1e-5
        assert scales == expected == [256, 128, 128, 256]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints(pool: Pool, tmp_path: Path, asynchronous: bool) -> None:
    for differences in run(pool, 2, exactness.resumed, 2, str(tmp_path), asynchronous):
        assert max(differences) <= 1e-10


def test_messages(pool: Pool) -> None:
    for found in run(pool, 2, exactness.messages, [2**10, 2**16]):
        assert [*found] == ["1024", "65536"]
        assert max(difference for difference, _ in found.values()) <= 1e-5


@pytest.mark.parametrize("kind", ["plain", "split", "tied", "recomputed", "scaler", "replicas"])
def test_no_waits(pool: Pool, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    (first, waits), (losses, others) = pool.run(2, on_sim, watched, kind)
    assert first == losses
    assert waits == others == []


def watched(rank: int, device: torch.device, kind: str) -> list[float]:
    """Between the job's steps the host may wait, inside of them not."""

    @contextmanager
    def waits_are_errors(_: torch.device) -> Any:
        syncs_inside_steps()
        yield
        assert syncs_inside_steps() == []

    measuring.waits_are_errors = waits_are_errors
    losses = measuring.steps_without_waits(rank, device, 2, kind)
    syncs_inside_steps()
    return losses


def test_the_machine_is_told_with_what_is_known_of_its_devices(pool: Pool) -> None:
    (machine,) = run(pool, 1, measuring.machine)
    assert machine["device_type"] == "sim"
    assert len(machine["devices"]) >= 1


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_memory_and_times(pool: Pool, num_ranks: int) -> None:
    for schedule in ("gpipe", "1f1b"):
        for found in run(pool, num_ranks, measuring.peak_memory, num_ranks, schedule, 8):
            assert abs(found["measured_bytes"] - found["planned_bytes"]) <= found["slack_bytes"], found
    for times in run(pool, num_ranks, measuring.enqueue_time, num_ranks, 16, 4):
        assert times["device_us"] > 0
        assert times["enqueue_us"] > 0
