"""What callers may ask for, and Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rota.errors import SearchError
from rota.search.budget import Budget


def refuse_wrong(num_microbatches: int, objective: str, objectives: Sequence[str]) -> None:
    """Raises SearchError."""
    if objective not in objectives:
        raise SearchError(f"objective is {objective!r}: use one of {', '.join(objectives)}")
    if num_microbatches < 1:
        raise SearchError(f"num_microbatches is {num_microbatches}; a step needs at least 1")


def seconds_of(time_limit_s: float) -> float:
    """Raises SearchError where no time is given."""
    if not time_limit_s > 0:
        raise SearchError(f"time_limit_s is {time_limit_s}; give the search more than 0 seconds")
    return time_limit_s


@contextmanager
def ended_by_ctrl_c(budget: Budget) -> Iterator[None]:
    """The first Ctrl-C stops the search, the next one is Python's own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        budget.stopped = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
