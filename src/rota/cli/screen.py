"""Output to the terminal."""

from __future__ import annotations

import io
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, final

from rota.cli.snapshots import snapshots_text
from rota.cli.transfers import FREE, transfers_text
from rota.core.plan import Plan
from rota.core.tables import fitted
from rota.core.timeline import Timeline

#: What the characters of charts and units become where the output's encoding has none of them.
_ASCII = str.maketrans(
    {"─": "-", "═": "=", "━": "=", "┄": "~", "·": ".", "▸": ">", "µ": "u", "×": "x", "…": "...", "−": "-", "→": "->"}
)
_EVERY_S = 5.0  # between lines of progress where there is no terminal
#: A fork must not happen while a line is being printed: the child would wait for ever for the lock of its stderr.
_PRINTING = threading.Lock()
os.register_at_fork(before=_PRINTING.acquire, after_in_parent=_PRINTING.release, after_in_child=_PRINTING.release)


@final
class _UnreadOutput(io.RawIOBase):
    """An output of this process that goes nowhere once its reader has ended, as `head` does, or its device is full."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.failure: OSError | None = None  # other than that the reader has ended

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            self.failure = None if isinstance(error, BrokenPipeError) else error
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._descriptor)
            os.close(nowhere)
            return memoryview(data).nbytes


def keep_working_unread() -> None:
    """Let the command do all its work, and write its files, when nobody reads what it prints any more.

    Its exit code then says how the work went.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.flush()
            output = io.BufferedWriter(_UnreadOutput(stream.fileno()))
            unread = io.TextIOWrapper(
                output,
                stream.encoding,
                stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, unread)


def lost_output() -> OSError | None:
    """Write what `print` has left to write. Returns why standard output could not be written, if so."""
    sys.stdout.flush()
    sys.stderr.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw.failure if isinstance(raw, _UnreadOutput) else None


def note(command: str | None, text: str) -> None:
    """Print a line about a command on standard error: apart from its results, which programs may read."""
    print(f"{f'rota {command or str()}'.rstrip()}: {text}", file=sys.stderr, flush=True)


def print_timeline(timeline: Timeline, *, may_be_free: bool = False) -> None:
    """Print a chart as wide as the terminal, in colour if it has any, and what the plan counts of its transfers.

    That line comes first if transfers are free, and is left out if they `may_be_free`. The chart has only the beginning
    of a step whose ops would be too narrow to be seen.
    """
    from rota.drawing import to_text

    counted = transfers_text(timeline.plan.placement)
    if counted == FREE and not may_be_free:
        print_text(counted)
    print(to_text(timeline, terminal_columns(), color=_wants_color(), may_cut=True))
    if counted not in ("", FREE):
        print_text(counted)


def terminal_columns() -> int:
    """The width of standard output, 20 or more; 100 where it is no terminal."""
    return max(shutil.get_terminal_size((100, 24)).columns, 20)


def report_columns() -> int | None:
    """The width that sentences are wrapped to: the terminal's, or COLUMNS; None: not at all, as in a log."""
    return terminal_columns() if sys.stdout.isatty() or os.environ.get("COLUMNS") else None


def print_text(text: str, *, to_stderr: bool = False) -> None:
    """Print lines of text, wrapped to the terminal's width; on standard error where standard output has JSON."""
    wrapped = "\n".join(fitted(line, report_columns()) for line in text.split("\n"))
    print(wrapped, file=sys.stderr if to_stderr else sys.stdout)


def print_transfers(plan: Plan) -> None:
    """Say what the plan counts of its transfers, if it sends anything."""
    if counted := transfers_text(plan.placement):
        print_text(counted)


def print_snapshots(timeline: Timeline) -> None:
    """Say whether the plan's memory has room for the states that restarts go on from, if that is known."""
    if text := snapshots_text(timeline):
        print_text(text)


def _wants_color() -> bool:
    """Whether this is a terminal with colours and the user does not object (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def print_replicas(plan: Plan, done: str) -> None:
    """Say that a plan is one pipeline, if it is meant for several replicas of it."""
    if plan.usage is not None and plan.usage.num_replicas > 1:
        print_text(f"This {done} one of {plan.usage.num_replicas} replicas: all of them run the same pipeline.")


def ascii_form(error: UnicodeError) -> tuple[str, int]:
    """A handler for `codecs.register_error`: characters that cannot be encoded become similar ones of ASCII, or a ?."""
    assert isinstance(error, UnicodeEncodeError)
    wrong = error.object[error.start : error.end].translate(_ASCII)
    return wrong.encode("ascii", "replace").decode(), error.end


@contextmanager
def progress_line() -> Iterator[Callable[[object], None]]:
    """A function that shows what is being done: on one line of a terminal, which is cleared in the end.

    Other outputs, such as a log, get a line every few seconds: the last one again if there is nothing new.
    """
    if sys.stderr.isatty():
        try:
            yield _overwrite
        finally:
            _overwrite("")
        return
    shown, is_over = [""], threading.Event()

    def show(doing: object) -> None:
        shown[0] = str(doing).strip()

    def repeat() -> None:
        while not is_over.wait(_EVERY_S):
            with _PRINTING, suppress(OSError):  # nobody reads it any more
                sys.stderr.write(shown[0] + "\n" if shown[0] else "")
                sys.stderr.flush()

    thread = threading.Thread(target=repeat, name="rota-progress", daemon=True)
    thread.start()
    try:
        yield show
    finally:
        is_over.set()
        thread.join()


def _overwrite(doing: object) -> None:
    """Overwrite the terminal's line."""
    print(f"\r\x1b[K{str(doing)[: _columns() - 1]}", end="", file=sys.stderr, flush=True)


def _columns() -> int:
    """The width of the terminal that shows progress: standard output may go elsewhere."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return columns or 80  # some terminals say 0
