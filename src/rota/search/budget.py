"""How long a search may go on, counted in a way that can be repeated."""

from __future__ import annotations

import time

NOMINAL_OPS_PER_S = 20_000_000  # ops that the compiled loops time in a nominal second


class Budget:
    """Nominal seconds of work, and seconds on the clock.

    Work is counted, not timed: `spend` is told what was done, as the seconds that it takes on an ordinary machine.
    Shares of a search are cut by this count alone, so that they are the same on every run. The clock only ends the
    search as a whole, and `deterministic` leaves it out: then `seconds` are nominal ones. What must not be waited for
    longer than `latest_s`, on the clock, ends then all the same.
    """

    def __init__(
        self,
        seconds: float,
        deterministic: bool = False,
        whole: Budget | None = None,
        latest_s: float = float("inf"),
    ) -> None:
        self.seconds = seconds
        self.deterministic = deterministic
        self.latest_s = latest_s if deterministic else min(seconds, latest_s)
        self.spent_s = 0.0
        self.stopped_by = ""  #: Ctrl-C, or an error of the caller's
        self.progress_error: Exception | None = None
        self._whole = whole
        self._began = time.monotonic()

    def share(self, nominal_s: float) -> Budget:
        """A part of it, which what is spent there is taken from."""
        return Budget(nominal_s, True, self)

    @property
    def elapsed_s(self) -> float:
        """On the clock."""
        return time.monotonic() - self._began

    @property
    def must_stop(self) -> bool:
        """Whether the clock, Ctrl-C or an error of the caller's has ended the whole."""
        if self._whole is not None:
            return self._whole.must_stop
        return bool(self.stopped_by) or self.elapsed_s >= self.latest_s

    @property
    def left_s(self) -> float:
        """0 when the search, or this share of it, has to end."""
        if self.must_stop:
            return 0.0
        left = self.seconds - (self.spent_s if self.deterministic else self.elapsed_s)
        return max(left if self._whole is None else min(left, self._whole.left_s), 0.0)

    @property
    def is_over(self) -> bool:
        return self.left_s <= 0

    def spend(self, nominal_s: float) -> None:
        self.spent_s += nominal_s
        if self._whole is not None:
            self._whole.spend(nominal_s)

    def spend_ops(self, num_ops: int) -> None:
        """Of compiled loops."""
        self.spend(num_ops / NOMINAL_OPS_PER_S)
