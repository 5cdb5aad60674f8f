"""Lines that say how a training goes, for `rota run`: step, loss, and a step's time beside the planned one."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import final

from rota.plan import Plan
from rota.runtime.environment import PROGRESS
from rota.simulation import simulate
from rota.units import time_text

_EVERY_S = 10.0
_FEW = 10  # steps, of which the median says little


def progress_of(plan: Plan, is_first: bool) -> StepProgress | None:
    """What shows the progress of a run; None on all processes but the first, and where no `rota run` asks for it."""
    return StepProgress(plan) if is_first and os.environ.get(PROGRESS) else None


@final
class StepProgress:
    """Prints a line every ten seconds, and the median of all steps at the end."""

    def __init__(self, plan: Plan, now_s: Callable[[], float] = time.monotonic) -> None:
        self._plan, self._now_s = plan, now_s
        self._told_s = now_s()
        self._durations_s: list[float] = []  # of all steps
        self._num_told = 0
        self._planned = ""

    def runs(self, plan: Plan) -> None:
        """The steps from now on run this plan."""
        self._plan, self._planned = plan, ""

    def done(self, number: int, begun_s: float, loss: float) -> None:
        """Step `number`, which began at `begun_s` of `time.monotonic`, has ended. A `loss` of nan is not told."""
        now_s = self._now_s()
        self._durations_s.append(now_s - begun_s)
        if now_s - self._told_s < _EVERY_S:
            return
        told_loss = "" if math.isnan(loss) else f"loss {loss:.4g}, "
        self._tell(f"step {number}: {told_loss}{self._median_text(self._num_told)} per step{self._planned_text()}")
        self._told_s, self._num_told = now_s, len(self._durations_s)

    def end(self) -> None:
        """The run is over."""
        if len(self._durations_s) >= _FEW:
            steps = f"{len(self._durations_s):,} steps, {self._median_text()} each in the median"
            self._tell(f"{steps}{self._planned_text()}")

    def _median_text(self, first: int = 0) -> str:
        return time_text(round(1e6 * median(self._durations_s[first:])))

    def _tell(self, line: str) -> None:
        print(f"rota run: {line}", file=sys.stderr, flush=True)

    def _planned_text(self) -> str:
        """The planned time of a step, if the plan's costs are of this model, as those of `rota autoplan` are."""
        if self._plan.usage is None:
            return " (the plan has no measured costs)"
        self._planned = self._planned or f" (planned: {time_text(simulate(self._plan).makespan_us)})"
        return self._planned
