"""How fast this machine's cores are, sampled while something else is measured on them.

The cores of a virtual machine differ by more from one minute to the next than two plans do. CPU time is measured, so
that waiting for a core does not count.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized
from statistics import median

_PAUSE_S, _MOST = 0.2, 100_000
_LOOPS = 20_000  # one to two ms: less than one percent of a core


class MachineSpeed:
    """Samples of what a fixed loop costs, in a process of its own."""

    def __init__(self) -> None:
        self._times_s = multiprocessing.RawArray("d", _MOST)
        self._costs_s = multiprocessing.RawArray("d", _MOST)
        self._count: Synchronized[int] = multiprocessing.Value("l", 0)

    @contextmanager
    def sampled(self) -> Iterator[MachineSpeed]:
        """Takes samples until the block ends."""
        process = multiprocessing.get_context("fork").Process(target=self._sample, daemon=True)
        process.start()
        try:
            yield self
        finally:
            process.kill()
            process.join()

    def _sample(self) -> None:
        for i in range(_MOST):
            began_s = time.process_time()
            sum(n * n for n in range(_LOOPS))
            self._costs_s[i] = time.process_time() - began_s
            self._times_s[i] = time.monotonic()
            self._count.value = i + 1
            time.sleep(_PAUSE_S)

    def cost_s(self, *periods_s: tuple[float, float]) -> float:
        """The median CPU time of the loop in these periods of `time.monotonic`."""
        samples = zip(self._times_s[: self._count.value], self._costs_s, strict=False)
        return median(
            cost_s for at_s, cost_s in samples if any(begin_s <= at_s <= end_s for begin_s, end_s in periods_s)
        )
