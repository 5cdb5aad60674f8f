"""The host waits for nothing inside a step, and enqueues an order that cannot hang."""

from __future__ import annotations

import pytest

from gpu.parameters import ONE_OR_TWO, UP_TO_FOUR, Ranks, Record
from support.gpu import exactness, measuring


@pytest.mark.gpu(1)
@pytest.mark.cuda
def test_a_wait_would_be_noticed(ranks: Ranks) -> None:
    assert ranks(1, measuring.a_wait_is_an_error) == [True]


@pytest.mark.parametrize("kind", ["plain", "split", "tied", "recomputed", "scaler"])
@pytest.mark.parametrize("num_ranks", ONE_OR_TWO)
def test_the_host_waits_for_nothing_inside_a_step(ranks: Ranks, num_ranks: int, kind: str) -> None:
    first, *others = ranks(num_ranks, measuring.steps_without_waits, num_ranks, kind)
    assert all(losses == first for losses in others)


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(2, marks=pytest.mark.gpu(2)), pytest.param(4, marks=pytest.mark.gpu(4))]
)
def test_nor_do_hosts_of_replicas(ranks: Ranks, num_ranks: int) -> None:
    first, *others = ranks(num_ranks, measuring.steps_without_waits, num_ranks, "replicas")
    assert all(losses == first for losses in others)


@pytest.mark.cuda
@pytest.mark.parametrize("num_ranks", UP_TO_FOUR)
def test_one_queue_in_hardware(ranks: Ranks, record_property: Record, num_ranks: int) -> None:
    """Kernels start in the order of their launch, whatever their streams: a wrong order would hang."""
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    found = ranks(num_ranks, exactness.families, num_ranks, "float32", environment=environment, timeout_s=200)
    record_property("worst_difference", max(max(of.values()) for of in found))
    assert max(max(of.values()) for of in found) <= 1e-5


@pytest.mark.gpu(2)
@pytest.mark.cuda
def test_large_messages_with_one_queue(ranks: Ranks) -> None:
    """Nothing of them is buffered."""
    found = ranks(2, exactness.messages, [2**24], environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert max(of[str(2**24)] for of in found) <= 1e-5


@pytest.mark.cuda
@pytest.mark.parametrize("num_ranks", ONE_OR_TWO)
def test_the_sanitizer_finds_no_race(ranks: Ranks, num_ranks: int) -> None:
    """PyTorch's own, which raises where two streams touch memory unordered. It does not see into NCCL's kernels."""
    schedules = ["1f1b", "zb_h1", "zb_v", "chimera"]
    found = ranks(
        num_ranks,
        exactness.families,
        num_ranks,
        "float32",
        schedules,
        environment={"TORCH_CUDA_SANITIZER": "1"},
        timeout_s=200,
    )
    assert max(max(of.values()) for of in found) <= 1e-5
