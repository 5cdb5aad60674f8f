"""Losses and gradients on accelerators are those of the unsplit model on the same device."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu.parameters import ONE_OR_TWO, UP_TO_FOUR, Ranks, Record
from support.gpu import exactness

TOLERANCE = {"float32": 1e-5, "float64": 1e-10}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_ranks", UP_TO_FOUR)
def test_every_family(ranks: Ranks, record_property: Record, num_ranks: int, dtype: str) -> None:
    """On one device, all stages of a plan for four ranks."""
    found = ranks(num_ranks, exactness.families, num_ranks, dtype, timeout_s=200)
    record_property("worst_difference", {name: max(of[name] for of in found) for name in found[0]})
    for of_rank in found:
        assert max(of_rank.values()) <= TOLERANCE[dtype], of_rank


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("num_ranks", ONE_OR_TWO)
def test_autocast(ranks: Ranks, record_property: Record, num_ranks: int, dtype: str) -> None:
    """The same casts on both sides, so that differences are those of another order of sums."""
    found = ranks(num_ranks, exactness.autocast, num_ranks, dtype)
    record_property("worst_difference", max(found))
    assert max(found) <= 1e-2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("num_ranks", ONE_OR_TWO)
def test_compiled_stages(ranks: Ranks, record_property: Record, num_ranks: int, backend: str, is_small: bool) -> None:
    if is_small and backend == "inductor":
        pytest.skip("tested on the CPU by tests/runtime/gradients/test_compiled.py")
    found = ranks(num_ranks, exactness.compiled, num_ranks, backend, timeout_s=220)
    record_property("worst_difference", max(found))
    assert max(found) <= 1e-4  # Inductor's kernels sum in another order


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "in the background"])
@pytest.mark.parametrize("num_ranks", ONE_OR_TWO)
def test_a_training_goes_on_from_its_checkpoint(
    ranks: Ranks, tmp_path: Path, num_ranks: int, asynchronous: bool
) -> None:
    found = ranks(num_ranks, exactness.resumed, num_ranks, str(tmp_path / "checkpoints"), asynchronous)
    for of_loss, of_weights in found:
        assert of_loss <= 1e-10
        assert of_weights <= 1e-10


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("how", ["fsdp", "fsdp by layer"])
@pytest.mark.parametrize(
    ("pp", "dp"),
    [pytest.param(1, 2, marks=pytest.mark.gpu(2)), pytest.param(2, 2, marks=pytest.mark.gpu(4))],
)
def test_wrapped_stages(ranks: Ranks, record_property: Record, pp: int, dp: int, how: str, schedule: str) -> None:
    found = ranks(pp * dp, exactness.wrapped, pp, dp, how, schedule, device_group=True)
    record_property("worst_difference", max(found))
    assert max(found) <= 1e-10


@pytest.mark.gpu(2)
def test_messages_below_and_above_the_buffers_of_nccl(ranks: Ranks, is_small: bool) -> None:
    """NCCL buffers 4 MiB: a send of less may end before its receive begins, one of more may not."""
    sizes = (
        [2**10, 2**16, 2**19, 2**20] if is_small else [2**10, 2**16, 2**19, 2**22 - 4, 2**22, 2**22 + 4, 2**24, 2**26]
    )
    found = ranks(2, exactness.messages, sizes)
    for of_rank in found:
        assert max(of_rank.values()) <= 1e-5, of_rank
