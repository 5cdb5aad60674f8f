"""Lines that say how a training goes, for `rota run`: step, loss, and a step's time beside the planned one."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import final

from rota.core.plan import Plan
from rota.core.simulation import simulate
from rota.core.text import size_text, time_text
from rota.runtime.environment import PROGRESS, processes_here, shared_cores

_EVERY_S = 10.0
_FEW = 10  # steps, of which the median says little


def progress_of(plan: Plan, is_first: bool, on_cpu: bool) -> StepProgress | None:
    """What shows the progress of a run; None on all processes but the first, and where no `rota run` asks for it."""
    if not (is_first and os.environ.get(PROGRESS)):
        return None
    progress = StepProgress(plan)
    if on_cpu:
        progress.begin()
    return progress


@final
class StepProgress:
    """Prints a line every ten seconds, and the median of all steps at the end."""

    def __init__(self, plan: Plan, now_s: Callable[[], float] = time.monotonic) -> None:
        self._plan, self._now_s = plan, now_s
        self._reported_s = now_s()
        self._begun_s: float | None = None  # when the last step began that nobody waited for
        self._durations_s: list[float] = []  # of all steps
        self._num_reported = 0
        self._planned = ""
        self._commits_s: list[tuple[float, float]] = []  # begin and end of each
        self._snapshot_bytes = 0

    def begin(self) -> None:
        """Say that the ranks of this machine share its cores, if the planned times are for a core per rank."""
        usage, shared = self._plan.usage, shared_cores(processes_here())
        if shared and usage is not None and not (usage.is_from_run or usage.is_estimate):
            self._say(shared)

    def done(self, number: int, begun_s: float, loss: float) -> None:
        """Report a step that has ended, if it is time to; it began at `begun_s` (`time.monotonic`).

        A loss of nan is not shown.
        """
        now_s = self._now_s()
        self._durations_s.append(now_s - begun_s)
        if now_s - self._reported_s >= _EVERY_S:
            loss_text = "" if math.isnan(loss) else f"loss {loss:.4g}, "
            duration = self._median_text(self._num_reported)
            self._say(f"step {number}: {loss_text}{duration} per step{self._planned_text()}")
            self._reported_s, self._num_reported = now_s, len(self._durations_s)
        self._begun_s = None

    def begun(self, number: int) -> None:
        """A step has begun that nobody waits for: the one before took until now, and its loss may not be known."""
        if self._begun_s is not None:
            self.done(number - 1, self._begun_s, math.nan)
        self._begun_s = self._now_s()

    def committed(self, begun_s: float, snapshot_bytes: int) -> None:
        """A state has been kept in memory; `snapshot_bytes`: the most memory that the states of a rank take."""
        self._commits_s.append((begun_s, self._now_s()))
        self._snapshot_bytes = snapshot_bytes

    def end(self) -> None:
        """The run is over."""
        if len(self._durations_s) >= _FEW:
            steps = f"{len(self._durations_s):,} steps, median {self._median_text()} each"
            self._say(f"{steps}{self._planned_text()}")
        if len(self._commits_s) >= _FEW:
            commit_s = median(ended - begun for begun, ended in self._commits_s)
            between_s = median(after - before for (_, before), (_, after) in pairwise(self._commits_s))
            share = f" ({commit_s / between_s:.1%} of the time from step to step)" if between_s else ""
            self._say(
                f"snapshots: median {time_text(round(1e6 * commit_s))} per step{share} on rank 0, and "
                f"{size_text(self._snapshot_bytes)} of memory on the rank that needs most"
            )

    def _median_text(self, first: int = 0) -> str:
        return time_text(round(1e6 * median(self._durations_s[first:])))

    def _say(self, line: str) -> None:
        print(f"rota run: {line}", file=sys.stderr, flush=True)

    def _planned_text(self) -> str:
        """The planned time of a step, if the plan's costs are of this model, as those of `rota autoplan` are."""
        if self._plan.usage is None:
            return " (the plan has no measured costs)"
        self._planned = self._planned or f" (planned: {time_text(simulate(self._plan).makespan_us)})"
        return self._planned
