"""Ends a rank that is stuck, and says where: the op it ran, or the value and the peer it waited for."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

EXIT_CODE = 70  # as sysexits.h: internal failure; `rota run` shows the message above it


class Watchdog:
    """`tick(doing)` is called for every action; a thread notices when no tick comes for `timeout_s`.

    The main thread sits in native code when it hangs and cannot raise, so the process is ended: what it waited for
    goes to standard error, and the launcher ends the other ranks.
    """

    def __init__(self, rank: int, timeout_s: float, describe: Callable[[], str]) -> None:
        self._rank, self._timeout_s, self._describe = rank, timeout_s, describe
        self._count = 0
        self._active = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rota-watchdog", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        self._count += 1
        self._active = True

    def tick(self) -> None:
        self._count += 1

    def end(self) -> None:
        self._active = False

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def _watch(self) -> None:
        interval = min(self._timeout_s / 10, 1.0)
        seen, still_s = -1, 0.0
        while not self._stop.wait(interval):
            if not self._active or self._count != seen:
                seen, still_s = self._count, 0.0
                continue
            still_s += interval
            if still_s >= self._timeout_s:
                self._end_process(still_s)

    def _end_process(self, still_s: float) -> None:
        print(
            f"rota: rank {self._rank} {self._describe()} for {still_s:.0f} s, and was ended by the watchdog "
            f"(timeout_s={self._timeout_s:g}); if it only needs longer, give Pipeline a larger timeout_s",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_CODE)
