"""Ctrl-C ends a search with the best so far, and is no error."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Stoppable(Protocol):
    """A search looks at `stopped` every now and then."""

    stopped: bool


@contextmanager
def ended_by_ctrl_c(search: Stoppable) -> Iterator[None]:
    """The first Ctrl-C stops the search, the next one is Python's own."""
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
