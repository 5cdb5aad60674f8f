"""Signals to the launcher, which its loop reads like any other input."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, final

from rota.core.errors import PipelineError

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)


@final
class EndedBySignal(PipelineError):
    """All ranks were ended by a signal to the launcher, without a checkpoint."""

    def __init__(self, number: signal.Signals, why: str) -> None:
        super().__init__(f"all ranks were ended by {number.name}{why}")
        self.number = number


@final
class Requests:
    """Collects signals while it is entered, on the main thread only: Python allows no handlers on others."""

    def __init__(self) -> None:
        #: The signal that asked the ranks to end after their step, if any.
        self.asked: signal.Signals | None = None
        #: Whether the script ends by itself when asked to; if it did before a restart, it will after it.
        self.listens = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Requests:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        if threading.current_thread() is threading.main_thread():
            handled = [number for number in _HANDLED if signal.getsignal(number) is not signal.SIG_IGN]  # by nohup
            self._before = {number: signal.signal(number, self._note) for number in handled}
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        os.close(self._read)
        os.close(self._write)

    def release(self) -> None:
        """Handle signals as before, such as in a forked process."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    @contextmanager
    def delayed(self) -> Iterator[None]:
        """Inside, signals wait: neither this process nor one that it forks handles any."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _note(self, number: int, _: FrameType | None) -> None:
        with suppress(BlockingIOError):  # the pipe is full of requests
            os.write(self._write, bytes([number]))

    def fileno(self) -> int:
        """A file descriptor that is readable when there is a request."""
        return self._read

    def taken(self) -> list[signal.Signals]:
        """The requests that have come since the last call."""
        try:
            return [*map(signal.Signals, os.read(self._read, 1024))]
        except BlockingIOError:
            return []

    def end_if_asked(self, when: str) -> None:
        """Raise KeyboardInterrupt or EndedBySignal if a request has come, while there are no ranks."""
        for number in self.taken():
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise EndedBySignal(number, f" {when}")
