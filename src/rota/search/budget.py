"""How long a search may go on, counted so that it can be repeated."""

from __future__ import annotations

import time

from rota.compiled import compiling_s

NOMINAL_OPS_PER_S = 20_000_000  #: ops that the compiled loops time in a nominal second
_MOST_BUSY = 4.0  # a process that waits looks like one on a busy machine


class Budget:
    """Nominal seconds of work, and real seconds.

    Work is counted, not timed: `spend` adds up what was done, as the seconds that it costs on an ordinary machine.
    Shares of a search depend on this count alone, so that they are the same on every run. Real time only ends the
    search as a whole.

    Args:
        seconds: How long the search may go on: real seconds, or nominal ones if `deterministic`.
        deterministic: Whether only nominal seconds count.
        whole: The budget that this is a share of.
        latest_s: Real seconds after which the search ends in any case.
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
        self.stopped_by = ""  #: Ctrl-C, or an error of the caller
        self.progress_error: Exception | None = None
        self._whole = whole
        self._reserved_s = 0.0
        self._began_s, self._began_cpu_s = time.monotonic() - compiling_s(), time.process_time()

    def share(self, nominal_s: float) -> Budget:
        """A part of this budget; what is spent there is spent here too."""
        return Budget(nominal_s, True, self)

    def reserve(self, seconds: float) -> None:
        """Ends the search so many real seconds sooner, at most half of its time, for what has to come after it.

        They are seconds of a core. Where the machine is busy, and gave this process less than that, it is more time.
        """
        self._reserved_s = seconds

    def last_at_least(self, seconds: float) -> None:
        """Ends the search no sooner than after so many real seconds."""
        self.latest_s = max(self.latest_s, seconds)

    @property
    def elapsed_s(self) -> float:
        """Real seconds since the beginning, without those in which loops were compiled, once on a machine."""
        return time.monotonic() - compiling_s() - self._began_s

    @property
    def must_stop(self) -> bool:
        """Whether real time, Ctrl-C or an error of the caller has ended the search as a whole."""
        if self._whole is not None:
            return self._whole.must_stop
        if self.stopped_by:
            return True
        elapsed_s = self.elapsed_s  # the second half is the earliest that it may end in: see `_after_s`
        return elapsed_s >= self.latest_s / 2 and elapsed_s >= self.latest_s - self._after_s

    @property
    def _after_s(self) -> float:
        """Real seconds for what comes after the search, at the pace that this process had so far."""
        if not self._reserved_s:
            return 0.0
        busy = self.elapsed_s / max(time.process_time() - self._began_cpu_s, 1e-3)
        return min(self._reserved_s * min(max(busy, 1.0), _MOST_BUSY), self.latest_s / 2)

    @property
    def left_s(self) -> float:
        """Seconds left; 0 when the search, or this share of it, has to end."""
        if self.must_stop:
            return 0.0
        left = self.seconds - (self.spent_s if self.deterministic else self.elapsed_s)
        return max(left if self._whole is None else min(left, self._whole.left_s), 0.0)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left."""
        return self.left_s <= 0

    def spend(self, nominal_s: float) -> None:
        """Counts work that costs so many seconds on an ordinary machine."""
        self.spent_s += nominal_s
        if self._whole is not None:
            self._whole.spend(nominal_s)

    def spend_ops(self, num_ops: int) -> None:
        """Counts ops that a compiled loop has timed."""
        self.spend(num_ops / NOMINAL_OPS_PER_S)
