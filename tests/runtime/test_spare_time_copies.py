"""Copies in spare time are whole when they are needed, whoever has made them."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from rota.runtime import spare_time_copies
from rota.runtime.spare_time_copies import SpareTimeCopies


@pytest.mark.parametrize("who", ["the thread", "the caller", "both"])
def test_copies_are_whole(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_time_copies, "_PIECE_BYTES", 1000)
    copies = SpareTimeCopies()
    if who == "the caller":  # as where the thread is never run
        monkeypatch.setattr(copies, "_run", lambda: None)
    for size in (100, 30_000):  # less than a piece, and a part of one at the end
        sources = [torch.randn(size), torch.randn(size + 1)]
        targets = [torch.zeros_like(source) for source in sources]
        copies.start(zip(targets, sources, strict=True))
        while who == "the thread" and copies._pieces:
            time.sleep(0.001)
        copies.finish()
        assert all(map(torch.equal, targets, sources))
    copies.close()
    assert "rota-spare-time-copies" not in {thread.name for thread in threading.enumerate()}


def test_nothing_to_copy() -> None:
    copies = SpareTimeCopies()
    copies.finish()
    copies.start([])
    copies.finish()
    copies.close()
    copies.close()
