"""A progress line: a bar in a terminal, now and then a plain line where output goes to a file."""

from __future__ import annotations

import sys
import time


class ProgressLine:
    """Counts `total` steps; silent where `shown` is False."""

    def __init__(self, total: int, shown: bool = True) -> None:
        self._total, self._shown = total, shown
        self._done = 0
        self._start_s = time.monotonic()

    def show(self, status: str) -> None:
        """One more step is done."""
        self._done += 1
        if not self._shown:
            return
        elapsed_s = time.monotonic() - self._start_s
        left_s = elapsed_s / self._done * (self._total - self._done)
        filled = round(24 * self._done / self._total)
        line = (
            f"step {self._done:>4}/{self._total}  {'█' * filled}{'░' * (24 - filled)}  {status}  {left_s:3.0f} s left"
        )
        if sys.stdout.isatty():
            print(f"\r{line} ", end="", flush=True)
        elif self._done == 1 or self._done == self._total or self._done % max(self._total // 6, 1) == 0:
            print(line, flush=True)

    def finish(self) -> None:
        if self._shown and sys.stdout.isatty():
            print(flush=True)
