"""Are limits kept: time, Ctrl-C, counted work, and the first search on a machine?

python benchmarks/search/limits.py [times ctrl_c counted first]
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from rows import Row, rows

from rota import Cluster, Costs, find_plan, wave
from rota.core.errors import SearchError
from rota.search import Progress

LIMITS_S = (0.1, 1.0, 5.0)
COUNTED_S = 3.0
PRESSES = 3


def times() -> None:
    """Seconds that a search lasts for each limit, and seconds to its first plan."""
    for row in rows():
        lasted = []
        for limit_s in LIMITS_S:
            told: list[Progress] = []
            began = time.perf_counter()
            find_plan(row.placement, row.num_microbatches, time_limit_s=limit_s, progress=told.append)
            lasted.append(f"{limit_s:>5} -> {time.perf_counter() - began:5.2f} (first {told[0].elapsed_s:.2f})")
        print(f"{row.name:<20}{'   '.join(lasted)}", flush=True)


def ctrl_c() -> None:
    """Seconds from Ctrl-C, at random moments, to the answer."""
    chooser = Random(0)
    for row in rows():
        delays = [_delay_s(row, chooser.uniform(0.05, 4)) for _ in range(PRESSES)]
        print(f"{row.name:<20}{'  '.join(f'{delay:.2f}' for delay in delays)}", flush=True)


def _delay_s(row: Row, after_s: float) -> float:
    """`after_s` after the search has begun, it is interrupted."""
    pressed: list[float] = []

    def press() -> None:
        pressed.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(after_s, press)
    timer.start()
    try:
        find_plan(row.placement, row.num_microbatches, time_limit_s=60)
    finally:
        timer.cancel()
    return time.perf_counter() - pressed[0] if pressed else 0.0


def counted() -> None:
    """Real seconds per nominal one."""
    for row in rows():
        began = time.perf_counter()
        try:
            find_plan(row.placement, row.num_microbatches, time_limit_s=COUNTED_S, deterministic=True)
        except SearchError as error:
            print(error)
        print(f"{row.name:<20}{(time.perf_counter() - began) / COUNTED_S:.2f}", flush=True)


def first() -> None:
    """The first searches on a machine: nothing is compiled yet."""
    for limit_s in (0.1, 1, 10, 30):
        with tempfile.TemporaryDirectory() as folder:
            code = f"import limits; limits.tight_wave({limit_s})"
            environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
            subprocess.run([sys.executable, "-c", code], env=environment, cwd=Path(__file__).parent, check=True)


def tight_wave(limit_s: float) -> None:
    """Searches a wave on 8 ranks and says when each method had its first turn."""
    placement = wave(Costs.uniform(16, 10, 12, 11, activation_bytes=2), Cluster.uniform(8, 16, latency_us=1))
    turns: dict[str, Progress] = {}
    began = time.perf_counter()
    result = find_plan(placement, 32, time_limit_s=limit_s, progress=lambda told: turns.setdefault(told.doing, told))
    lasted_s = time.perf_counter() - began
    print(f"limit {limit_s} s: {lasted_s:.2f} s, {result.makespan_us} us by {result.how}, bound {result.bound_us}")
    for doing in ("list scheduling", "steady state", "local search", "windows"):
        if doing in turns:
            print(f"   {doing} after {turns[doing].elapsed_s:.2f} s")


SECTIONS: dict[str, Callable[[], None]] = {one.__name__: one for one in (times, ctrl_c, counted, first)}


def main() -> None:
    wanted = sys.argv[1:] or list(SECTIONS)
    if unknown := set(wanted) - set(SECTIONS):
        sys.exit(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    tight_wave(20)  # compiles or loads all loops
    for name in wanted:
        print(f"\n== {name}: {SECTIONS[name].__doc__}", flush=True)
        SECTIONS[name]()


if __name__ == "__main__":
    main()
