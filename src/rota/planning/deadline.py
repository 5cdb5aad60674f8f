"""How long a search for plans may go on, and how it reports its progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, final

from rota.core.stopping import guarded
from rota.core.text import count_text, time_text

_EVERY_S = 0.2  # between reports where nothing better was found


class Progress(NamedTuple):
    """How far a search is: what it does, plans simulated so far, and the best step time (None: nothing fits yet)."""

    doing: str
    num_plans: int
    best_us: int | None
    elapsed_s: float

    def __str__(self) -> str:
        best = "nothing fits yet" if self.best_us is None else f"best {time_text(self.best_us)}"
        return f"{self.elapsed_s:5.1f} s  {count_text(self.num_plans, 'plan')}  {best}  {self.doing}"


@final
class Deadline:
    """Ends after `seconds`, or when it is stopped, by Ctrl-C or by an error of `progress`.

    The seconds count from `began_s` of `time.monotonic`; None: from now on.
    """

    def __init__(
        self, seconds: float, progress: Callable[[Progress], None] | None, began_s: float | None = None
    ) -> None:
        self.seconds = seconds
        self.stopped_by = ""
        self.progress_error: Exception | None = None
        #: Whether something was left out for lack of time.
        self.ran_out = False
        self._progress = guarded(progress, self)
        self._began = time.monotonic() if began_s is None else began_s
        self._reported_s = float("-inf")

    @property
    def elapsed_s(self) -> float:
        """Seconds since the search began."""
        return time.monotonic() - self._began

    @property
    def left_s(self) -> float:
        """Seconds left; 0.0 once the search was stopped."""
        return 0.0 if self.stopped_by else max(self.seconds - self.elapsed_s, 0.0)

    def has(self, seconds: float) -> bool:
        """Whether more than `seconds` are left; if not, `ran_out` is set."""
        enough = self.left_s > seconds
        self.ran_out |= not enough
        return enough

    def report(self, doing: str, num_plans: int, best_us: int | None, at_once: bool = False) -> None:
        """Call `progress` with the best makespan so far (µs), at most every `_EVERY_S` seconds unless `at_once`."""
        if at_once or self.elapsed_s - self._reported_s > _EVERY_S:
            self._reported_s = self.elapsed_s
            self._progress(Progress(doing, num_plans, best_us, self.elapsed_s))
