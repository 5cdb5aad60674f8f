"""What ends a search before it is done: Ctrl-C, its time limit, an error of the caller's `progress`.

A search that is ended answers with the best so far. Its parts look every now and then whether they should go on: those
that have a budget ask it; those that know of none, such as a schedule that is built step by step, call `look`.
"""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

_Told = TypeVar("_Told")


class Stoppable(Protocol):
    """A search looks at `stopped_by` every now and then: "" or what has stopped it."""

    stopped_by: str
    progress_error: Exception | None


class Stopped(Exception):
    """Raised by `look` where the search is over; whoever has something to show for its work so far returns that."""


_must_stop: ContextVar[Callable[[], bool]] = ContextVar("must_stop", default=lambda: False)


@contextmanager
def watched(must_stop: Callable[[], bool]) -> Iterator[None]:
    """Inside, `look` raises Stopped as soon as `must_stop()` holds, or what is watched around it."""
    around = _must_stop.get()
    token = _must_stop.set(lambda: must_stop() or around())
    try:
        yield
    finally:
        _must_stop.reset(token)


def look() -> None:
    """To be called after some milliseconds of work at most; raises Stopped where a search around it is over."""
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


def guarded(progress: Callable[[_Told], None] | None, search: Stoppable) -> Callable[[_Told], None]:
    """`progress`, an error of which stops the search; it is warned of at once, and kept in `progress_error`."""

    def tell(told: _Told) -> None:
        if progress is None or search.progress_error is not None:
            return
        try:
            progress(told)
        except Exception as error:
            search.progress_error = error
            search.stopped_by = f"{type(error).__name__} in progress: {error}"
            warnings.warn(f"the search ends with the best so far: {search.stopped_by}", RuntimeWarning, stacklevel=2)

    return tell
