"""Stop a search early: on Ctrl-C, at its time limit, or on an error of the caller's `progress`.

A stopped search returns the best result so far. Its parts check regularly whether to go on: those that have a budget
ask it; the others, such as a schedule that is built step by step, call `look`.
"""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Protocol, TypeVar

_Report = TypeVar("_Report")


class Stoppable(Protocol):
    """A search that checks `stopped_by` regularly: the reason to stop, "" if there is none."""

    stopped_by: str
    progress_error: Exception | None


class Stopped(Exception):
    """Raised by `look` when the search must stop; code that has a result by then catches it and returns the result."""


_must_stop: ContextVar[Callable[[], bool]] = ContextVar("must_stop", default=lambda: False)


@contextmanager
def watched(must_stop: Callable[[], bool]) -> Iterator[None]:
    """In the block, `look` raises Stopped once `must_stop()`, or that of a surrounding block, is true."""
    around = _must_stop.get()
    token = _must_stop.set(lambda: must_stop() or around())
    try:
        yield
    finally:
        _must_stop.reset(token)


def look() -> None:
    """Raise Stopped if a surrounding search must stop; call this every few milliseconds."""
    if _must_stop.get()():
        raise Stopped


@contextmanager
def ended_by_ctrl_c(search: Stoppable) -> Iterator[None]:
    """The first Ctrl-C in the block sets `search.stopped`; the next one raises KeyboardInterrupt as usual."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        search.stopped_by = "Ctrl-C"
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def guarded(progress: Callable[[_Report], None] | None, search: Stoppable) -> Callable[[_Report], None]:
    """Wrap `progress`: an error in it stops the search, is reported as a warning, and is kept in `progress_error`."""

    def tell(report: _Report) -> None:
        if progress is None or search.progress_error is not None:
            return
        try:
            progress(report)
        except Exception as error:
            search.progress_error = error
            search.stopped_by = f"{type(error).__name__} in progress: {error}"
            with suppress(RuntimeWarning):  # where warnings are errors, nothing is lost either
                warnings.warn(
                    f"the search ends with the best so far: {search.stopped_by}", RuntimeWarning, stacklevel=2
                )

    return tell
