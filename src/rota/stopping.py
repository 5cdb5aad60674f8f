"""Ctrl-C ends a search with the best result so far instead of an error."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Stoppable(Protocol):
    """A search that checks `stopped` regularly, and ends with its best result once it is set."""

    stopped: bool


@contextmanager
def ended_by_ctrl_c(search: Stoppable) -> Iterator[None]:
    """The first Ctrl-C in the block sets `search.stopped`; the next one raises KeyboardInterrupt as usual."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        search.stopped = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
