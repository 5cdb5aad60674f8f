"""How much of this machine's time other programs use, while something is measured."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import final

_STAT = Path("/proc/stat")
_LEAST_S = 0.5  # without which missing cores are not judged: the system counts in ticks of 10 ms
_BUSY = (0, 1, 2, 5, 6, 7)  # of a line of /proc/stat: user, nice, system, irq, softirq, steal


@final
class OtherPrograms:
    """Counts, from when it is made, what is neither this process's nor its children's that have ended."""

    def __init__(self) -> None:
        self._began_s, self._others_s = time.monotonic(), _others_s()

    def num_cores(self) -> float:
        """How many cores they used on average since then; 0.0 where the system does not tell."""
        elapsed_s = time.monotonic() - self._began_s
        return max(0.0, _others_s() - self._others_s) / elapsed_s if elapsed_s else 0.0

    def missing_cores(self, num_processes: int) -> float:
        """How many cores they took from `num_processes` processes of one thread; 0.0 for less than half a second."""
        if time.monotonic() - self._began_s < _LEAST_S:
            return 0.0
        return max(0.0, self.num_cores() + num_processes - (os.cpu_count() or 1))


def _others_s() -> float:
    """CPU seconds that other programs have used since the machine started."""
    if not _STAT.exists():
        return 0.0
    fields = _STAT.read_text().split("\n", 1)[0].split()[1:]
    busy_s = sum(int(fields[i]) for i in _BUSY) / os.sysconf("SC_CLK_TCK")
    of_ours = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return busy_s - sum(usage.ru_utime + usage.ru_stime for usage in of_ours)
