"""Memory and times of accelerators are what plan and profiler say."""

from __future__ import annotations

import pytest

from gpu.parameters import UP_TO_FOUR, Ranks, Record
from support.gpu import measuring


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_ranks", UP_TO_FOUR)
def test_the_peak_of_memory_is_the_plans(
    ranks: Ranks, record_property: Record, num_ranks: int, schedule: str, device_type: str
) -> None:
    if device_type == "cpu":
        pytest.skip("the CPU has no allocator that counts; tests/runtime/test_memory.py measures there")
    for rank, found in enumerate(ranks(num_ranks, measuring.peak_memory, num_ranks, schedule, 2**14)):
        record_property(f"rank {rank}", found)
        assert abs(found["measured_bytes"] - found["planned_bytes"]) <= found["slack_bytes"], found


@pytest.mark.gpu(1)
@pytest.mark.cuda
def test_the_clock_of_events_is_the_profilers(ranks: Ranks, record_property: Record) -> None:
    """With full queues an op lasts as long as its kernels, and a step from the first kernel to the last."""
    (found,) = ranks(1, measuring.event_clock, 4096, 2048)
    record_property("times", found)
    assert found["num_kernels"] > 0, "the profiler has seen no kernel: is CUPTI there, and allowed?"
    assert found["ops_us"] == pytest.approx(found["kernels_us"], rel=0.1)
    assert found["ops_span_us"] == pytest.approx(found["kernels_span_us"], rel=0.1)
