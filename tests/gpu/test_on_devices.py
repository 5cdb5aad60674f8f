"""What only a device shows: its precision, messages, waits, queues, memory and times, and the end of a lost rank."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.checkpoint_runs import Run, serial_losses, stored
from support.gpu import jobs
from support.gpu.jobs import largest
from support.gpu.ranks import Ranks, run_doomed
from support.pool import WorkerFailed

Record = Callable[[str, object], None]

ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


@pytest.mark.parametrize(
    ("job", "how", "tolerance"),  # in autocast, the same casts on both sides; Inductor's kernels sum in another order
    [
        (jobs.autocast, "bfloat16", 1e-2),
        (jobs.autocast, "float16", 1e-2),
        (jobs.compiled, "aot_eager", 1e-4),
        (jobs.compiled, "inductor", 1e-4),
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_autocast_and_compiled_stages(
    ranks: Ranks, ranks_or_cpu: Ranks, record_property: Record, num_ranks: int, job: Any, how: str, tolerance: float
) -> None:
    on = ranks if job is jobs.autocast else ranks_or_cpu
    if how == "inductor" and on.place_of(1).kind == "cpu":
        pytest.skip("tested on the CPU by tests/runtime/gradients/test_compiled.py")
    difference = largest(on(num_ranks, job, num_ranks, how, timeout_s=220))
    record_property("worst_difference", difference)
    assert difference <= tolerance


def test_a_training_goes_on_with_another_plan_on_devices_and_on_cpus(
    ranks: Ranks, ranks_or_cpu: Ranks, tmp_path: Path
) -> None:
    losses = serial_losses(6)
    for run, on, begin in ((Run("1f1b", 2), ranks, 0), (Run("v", 2), ranks_or_cpu, 2), (Run("zb", 1), ranks, 4)):
        for losses_of_rank in on(run.num_processes, jobs.trained, run, tmp_path, begin, begin + 2):
            assert losses_of_rank == pytest.approx(losses[begin : begin + 2], abs=1e-10)
        tensors, _ = stored(tmp_path / f"step-{begin + 2}")
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float64, torch.float32}  # the steps' counts


@pytest.mark.parametrize(("pp", "schedule"), [(1, "1f1b"), (2, "zb_h1")])
def test_stages_in_fsdp2(ranks_or_cpu: Ranks, record_property: Record, pp: int, schedule: str) -> None:
    ranks_or_cpu.renew()
    difference = largest(ranks_or_cpu(pp * 2, jobs.wrapped, pp, 2, schedule))
    record_property("worst_difference", difference)
    assert difference <= 1e-10


def test_a_model_in_ddp_beside_a_pipeline(ranks_or_cpu: Ranks) -> None:
    assert largest(ranks_or_cpu(2, jobs.beside_ddp, 2)) <= 1e-4


@pytest.mark.parametrize("environment", [{}, ONE_QUEUE], ids=str)
def test_messages_below_and_above_the_buffers_of_nccl(ranks: Ranks, hardware: Any, environment: dict[str, str]) -> None:
    """NCCL buffers 4 MiB: a send of less may end before its receive begins, one of more may not."""
    large = [2**19, 2**22 - 4, 2**22, 2**22 + 4, 2**24, 2**26] if hardware.is_real else [2**20]
    ranks.environment = environment
    assert largest(ranks(2, jobs.messages, [2**10, 2**16, *large])) <= 1e-5


def test_memory_is_released_when_nobody_reads_it(ranks: Ranks) -> None:
    assert largest(ranks(2, jobs.poisoned, False)) <= 1e-4


def test_memory_that_is_released_too_early_would_be_noticed(ranks: Ranks) -> None:
    try:
        are_wrong = not largest(ranks(2, jobs.poisoned, True)) <= 1e-4
    except WorkerFailed as error:
        are_wrong = "FreedTooEarlyError" in str(error)
    assert are_wrong


def test_a_wait_would_be_noticed(ranks: Ranks, hardware: Any) -> None:
    if hardware.place.kind not in ("cuda", "sim"):
        pytest.skip("PyTorch makes waits errors on CUDA alone")
    ranks(1, jobs.a_wait_is_an_error)


def test_kernels_of_nccl_leave_room_for_each_other(ranks: Ranks, record_property: Record) -> None:
    if ranks.place_of(2).backend != "nccl":
        pytest.skip("the limit is NCCL's")
    limits = ranks(2, jobs.limits_of_kernels, 2)
    record_property("most_ctas", limits)
    assert all(0 < number <= most for of_rank in limits for number, most in of_rank)
    assert [len(of_rank) for of_rank in limits] == [3, 3]  # two channels, and all ranks


@pytest.mark.parametrize(
    ("num_ranks", "kind"),
    [(1, "plain"), (2, "split"), (2, "tied"), (2, "recomputed"), (2, "scaler"), (2, "replicas"), (4, "replicas")],
)
def test_the_host_waits_for_nothing_inside_a_step(ranks: Ranks, hardware: Any, num_ranks: int, kind: str) -> None:
    if ranks.place_of(num_ranks).backend == "gloo":
        pytest.skip("the ranks share a device, and Gloo waits for it")
    first, *others = ranks(num_ranks, jobs.steps_without_waits, num_ranks, kind)
    assert all(losses == first for losses in others)


@pytest.mark.parametrize(("num_ranks", "schedule"), [(1, "gpipe"), (2, "1f1b"), (4, "1f1b")])
def test_the_peak_of_memory_is_the_plans(
    ranks: Ranks, hardware: Any, record_property: Record, num_ranks: int, schedule: str
) -> None:
    rows = 2**14 if hardware.is_real else 2**8
    for rank, peaks in enumerate(ranks(num_ranks, jobs.peak_memory, num_ranks, schedule, rows)):
        record_property(f"rank {rank}", peaks)
        assert abs(peaks["measured_bytes"] - peaks["planned_bytes"]) <= peaks["slack_bytes"], peaks


def test_the_clock_of_events_is_the_profilers(ranks_or_cpu: Ranks, hardware: Any, record_property: Record) -> None:
    """With full queues an op lasts as long as its kernels, and a step from the first kernel to the last."""
    (times,) = ranks_or_cpu(1, jobs.event_clock, *((4096, 2048) if hardware.is_real else (16, 8)))
    if hardware.place.kind != "cuda":
        pytest.skip("the profiler knows CUDA's kernels alone")
    record_property("times", times)
    assert times["num_kernels"] > 0, "the profiler has seen no kernel: is CUPTI there, and allowed?"
    assert times["ops_us"] == pytest.approx(times["kernels_us"], rel=0.1)
    assert times["ops_span_us"] == pytest.approx(times["kernels_span_us"], rel=0.1)


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize(("num_ranks", "schedule"), [(1, "1f1b"), (2, "1f1b"), (2, "zb_h1")])
def test_time_per_action(
    ranks_or_cpu: Ranks, hardware: Any, record_property: Record, num_ranks: int, schedule: str, size: str
) -> None:
    """It is measured, not judged."""
    sizes = (4096, 2048) if size == "large" and hardware.is_real else (16, 8)
    for rank, times in enumerate(ranks_or_cpu(num_ranks, jobs.host_cost, num_ranks, schedule, *sizes)):
        record_property(f"rank {rank}", times)
        assert min(times.values()) > 0


def test_products_beside_a_receive_that_waits(ranks: Ranks, hardware: Any, record_property: Record) -> None:
    """It is measured, not judged."""
    if ranks.place_of(2).backend == "gloo":
        pytest.skip("the ranks share a device, and Gloo has no kernel that waits")
    ranks.environment = {"NCCL_MAX_CTAS": ""}  # which would go before what a group asks for
    for num_ctas in (1, 2, 4, 8, 16, 24):
        _, times = ranks(2, jobs.gemm_beside_receive, num_ctas, *((4096, 200) if hardware.is_real else (16, 4)))
        record_property(f"{num_ctas} CTAs", times)
        assert times["beside_us"] > 0


@pytest.mark.parametrize(("num_ranks", "where"), [(2, "in a step"), (4, "between steps")])
def test_a_killed_rank_ends_the_others(tmp_path: Path, ranks: Ranks, num_ranks: int, where: str) -> None:
    """No other is left waiting on its device."""
    ended = run_doomed(tmp_path, ranks.place_of(num_ranks), num_ranks, jobs.a_rank_is_killed, num_ranks, where)
    assert ended[-1].exit_code == -signal.SIGKILL
    for rank, other in enumerate(ended[:-1]):
        assert other.exit_code in (1, jobs.LOST), f"rank {rank} was left: {other.stderr}"
        assert "LostRankError: lost" in other.stderr or f"no progress for {jobs.TIMEOUT_S} s" in other.stderr, other
