"""Ctrl-C while modules are imported: some of them turn it into errors of their own."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def exit_on_ctrl_c() -> Iterator[None]:
    """Inside, Ctrl-C ends the process at once, with a message: run nothing inside that needs a clean-up."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # another handler is installed
        return
    signal.signal(signal.SIGINT, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(*_: object) -> None:
    os.write(2, f"{' '.join(['rota', *sys.argv[1:2]])}: interrupted\n".encode())
    os._exit(130)
