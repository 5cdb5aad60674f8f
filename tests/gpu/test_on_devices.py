"""What only a device shows: its precision, messages, waits, queues, memory and times, and the end of a lost rank."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.gpu import jobs
from support.gpu.ranks import run_ranks

Ranks = Callable[..., Any]
Record = Callable[[str, object], None]

ONE_OR_TWO = [pytest.param(number, marks=pytest.mark.gpu(number)) for number in (1, 2)]
TWO_OR_FOUR = [pytest.param(number, marks=pytest.mark.gpu(number)) for number in (2, 4)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("num_ranks", ONE_OR_TWO)
def test_autocast(ranks: Ranks, record_property: Record, num_ranks: int, dtype: str) -> None:
    """The same casts on both sides, so that differences are those of another order of sums."""
    found = ranks(num_ranks, jobs.autocast, num_ranks, dtype)
    record_property("worst_difference", max(found))
    assert max(found) <= 1e-2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("num_ranks", ONE_OR_TWO)
def test_compiled_stages(ranks: Ranks, record_property: Record, num_ranks: int, backend: str, is_small: bool) -> None:
    if is_small and backend == "inductor":
        pytest.skip("tested on the CPU by tests/runtime/gradients/test_compiled.py")
    found = ranks(num_ranks, jobs.compiled, num_ranks, backend, timeout_s=220)
    record_property("worst_difference", max(found))
    assert max(found) <= 1e-4  # Inductor's kernels sum in another order


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "in the background"])
@pytest.mark.parametrize("num_ranks", ONE_OR_TWO)
def test_a_training_goes_on_from_its_checkpoint(
    ranks: Ranks, tmp_path: Path, num_ranks: int, asynchronous: bool
) -> None:
    for of_loss, of_weights in ranks(num_ranks, jobs.resumed, num_ranks, str(tmp_path / "checkpoints"), asynchronous):
        assert max(of_loss, of_weights) <= 1e-10


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("pp", [pytest.param(1, marks=pytest.mark.gpu(2)), pytest.param(2, marks=pytest.mark.gpu(4))])
def test_wrapped_stages(ranks: Ranks, record_property: Record, pp: int, schedule: str) -> None:
    found = ranks(pp * 2, jobs.wrapped, pp, 2, schedule, device_group=True)
    record_property("worst_difference", max(found))
    assert max(found) <= 1e-10


@pytest.mark.gpu(2)
@pytest.mark.parametrize("num_queues", ["", "1"])
def test_messages_below_and_above_the_buffers_of_nccl(ranks: Ranks, num_queues: str, is_small: bool) -> None:
    """NCCL buffers 4 MiB: a send of less may end before its receive begins, one of more may not."""
    sizes = [2**10, 2**16, 2**20] if is_small else [2**10, 2**16, 2**19, 2**22 - 4, 2**22, 2**22 + 4, 2**24, 2**26]
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": num_queues} if num_queues else {}
    assert max(ranks(2, jobs.messages, sizes, environment=environment)) <= 1e-5


@pytest.mark.gpu(1)
@pytest.mark.cuda
def test_a_wait_would_be_noticed(ranks: Ranks) -> None:
    assert ranks(1, jobs.a_wait_is_an_error) == [True]


@pytest.mark.gpu(2)
@pytest.mark.cuda
def test_kernels_of_nccl_leave_room_for_each_other(ranks: Ranks, record_property: Record) -> None:
    limits = ranks(2, jobs.limits_of_kernels, 2)
    record_property("most_ctas", limits)
    assert all(0 < number <= most for of_rank in limits for number, most in of_rank)
    assert [len(of_rank) for of_rank in limits] == [3, 3]  # two channels, and all ranks


@pytest.mark.parametrize(
    ("num_ranks", "kind"),
    [
        *(pytest.param(2, kind, marks=pytest.mark.gpu(2)) for kind in ("split", "tied", "recomputed", "scaler")),
        pytest.param(1, "plain", marks=pytest.mark.gpu(1)),
        pytest.param(4, "replicas", marks=pytest.mark.gpu(4)),
    ],
)
def test_the_host_waits_for_nothing_inside_a_step(ranks: Ranks, num_ranks: int, kind: str) -> None:
    first, *others = ranks(num_ranks, jobs.steps_without_waits, num_ranks, kind)
    assert all(losses == first for losses in others)


@pytest.mark.parametrize(
    ("num_ranks", "schedule"),
    [
        pytest.param(number, schedule, marks=pytest.mark.gpu(number))
        for number, schedule in ((1, "gpipe"), (2, "1f1b"), (4, "1f1b"))
    ],
)
def test_the_peak_of_memory_is_the_plans(
    ranks: Ranks, record_property: Record, num_ranks: int, schedule: str, is_small: bool
) -> None:
    if is_small:
        pytest.skip("the CPU has no allocator that counts; tests/runtime/test_memory.py measures there")
    for rank, found in enumerate(ranks(num_ranks, jobs.peak_memory, num_ranks, schedule, 2**14)):
        record_property(f"rank {rank}", found)
        assert abs(found["measured_bytes"] - found["planned_bytes"]) <= found["slack_bytes"], found


@pytest.mark.gpu(1)
@pytest.mark.cuda
def test_the_clock_of_events_is_the_profilers(ranks: Ranks, record_property: Record) -> None:
    """With full queues an op lasts as long as its kernels, and a step from the first kernel to the last."""
    (found,) = ranks(1, jobs.event_clock, 4096, 2048)
    record_property("times", found)
    assert found["num_kernels"] > 0, "the profiler has seen no kernel: is CUPTI there, and allowed?"
    assert found["ops_us"] == pytest.approx(found["kernels_us"], rel=0.1)
    assert found["ops_span_us"] == pytest.approx(found["kernels_span_us"], rel=0.1)


@pytest.mark.parametrize("where", ["between steps", "in a step"])
@pytest.mark.parametrize("num_ranks", TWO_OR_FOUR)
def test_a_killed_rank_ends_the_others(tmp_path: Path, device_type: str, num_ranks: int, where: str) -> None:
    """No other is left waiting on its device."""
    timeout_s = jobs.TIMEOUT_S + 180
    ended = run_ranks(tmp_path, num_ranks, device_type, jobs.a_rank_is_killed, num_ranks, where, timeout_s=timeout_s)
    assert ended[-1].exit_code == -signal.SIGKILL
    for rank, each in enumerate(ended[:-1]):
        assert each.exit_code in (1, jobs.LOST), f"rank {rank} was left: {each.stderr}"
        assert "LostRankError: lost" in each.stderr or f"no progress for {jobs.TIMEOUT_S} s" in each.stderr, each
