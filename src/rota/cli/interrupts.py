"""Ctrl-C while modules are loaded, some of which turn it into errors of their own."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def told_at_once() -> Iterator[None]:
    """Ctrl-C says so and ends the process there and then: nothing that would have to be cleaned up may run inside."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # someone else has a use for it
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: object) -> None:
    os.write(2, f"{' '.join(['rota', *sys.argv[1:2]])}: interrupted\n".encode())
    os._exit(130)
