"""SIGTERM and SIGUSR1 ask a training run to end: noted at once, agreed on at a step's end, acted on by the script.

one rank:  signal ──▶ noted ─┐
launcher:  signal ──▶ sent ──┴─▶ in the all-reduce of the losses ──▶ `pipeline.should_stop` on all ranks
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, TypeAlias, final

from rota.runtime import control

Handler: TypeAlias = Callable[[int, FrameType | None], Any] | int | None

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
#: Slurm signals every process, and torchrun its workers again: signals within this time are one request.
SAME_REQUEST_S = 3.0


@final
class StopRequests:
    """One rank's requests to end. Until `listen`, signals have the effect that they had before."""

    def __init__(self, is_first: bool, now: Callable[[], float] = time.monotonic) -> None:
        #: Whether all ranks agreed to stop at the end of the last step.
        self.agreed = False
        self._is_first, self._now = is_first, now
        self._asked: signal.Signals | None = None
        self._asked_s = 0.0
        self._before: dict[signal.Signals, Handler] = {}
        self._process = 0
        self._listens = False

    def listen(self) -> None:
        """Note signals from now on instead of ending; only on the main thread, as Python allows no other to do so."""
        if self._listens:
            return
        self._listens = True
        if self._is_first:
            control.report("listens")
        if threading.current_thread() is threading.main_thread():
            self._process = os.getpid()
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def asked(self) -> bool:
        """Whether this rank got a signal, or, on the first rank, a request of the launcher."""
        return self._asked is not None or (self._listens and self._is_first and control.stop_is_asked())

    def close(self, failed: bool = False) -> None:
        """Restore the handlers; after a failure, repeat a signal that no step's end has handled."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            if signal.getsignal(number) == self._note:  # else another one was set since
                with suppress(ValueError):  # closed on another thread: they stay, and act at the next signal
                    signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if failed and self._asked is not None and not self.agreed:
            os.kill(os.getpid(), self._asked)

    def _note(self, number: int, frame: FrameType | None) -> None:
        again = self._asked is not None and self._now() - self._asked_s > SAME_REQUEST_S
        if again or os.getpid() != self._process:  # a process forked from this one has no step to end
            self.close()
            os.kill(os.getpid(), number)
            return
        if self._asked is None:
            self._asked, self._asked_s = signal.Signals(number), self._now()
        before = self._before.get(signal.Signals(number))
        if callable(before):
            before(number, frame)
