"""What a step frees stays with the process, so that the next one fetches no pages."""

from __future__ import annotations

import resource
import sys

import pytest
import torch

from rota.profiling.forked import run_forked


def fetched_pages(_: int) -> list[int]:
    """How many pages each of six steps fetches for its 16 buffers of 8 MiB."""
    counts = []
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        buffers = [torch.zeros(1 << 21) for _ in range(16)]
        buffers.clear()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return counts


@pytest.mark.dist
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_only_the_first_steps_fetch_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    ((first, _, _, *later),) = run_forked(1, fetched_pages)
    assert max(later) < 100 < first
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")  # the user's own setting is left as it is
    ((_, _, _, *later),) = run_forked(1, fetched_pages)
    assert min(later) > 1000
