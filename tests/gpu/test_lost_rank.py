"""A rank is killed, and no other is left waiting on its device."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from support.gpu.failing import LOST, TIMEOUT_S, a_rank_is_killed
from support.gpu.ranks import run_ranks


@pytest.mark.parametrize("where", ["between steps", "in a step"])
@pytest.mark.parametrize("num_ranks", [pytest.param(number, marks=pytest.mark.gpu(number)) for number in (2, 4)])
def test_a_killed_rank_ends_the_others(
    tmp_path: Path, device_type: str, record_property: Callable[[str, object], None], num_ranks: int, where: str
) -> None:
    ended = run_ranks(tmp_path, num_ranks, device_type, a_rank_is_killed, num_ranks, where, timeout_s=TIMEOUT_S + 180)
    assert ended[-1].exit_code == -signal.SIGKILL
    for rank, one in enumerate(ended[:-1]):
        record_property(f"rank {rank}", {"exit_code": one.exit_code})
        assert one.exit_code in (1, LOST), f"rank {rank} was left: {one.stderr}"
        assert "LostRankError: lost" in one.stderr or f"no progress for {TIMEOUT_S} s" in one.stderr, one.stderr
