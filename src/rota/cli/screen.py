"""Output to the terminal."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rota.core.cluster import HOST
from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.core.text import count_text, fitted, size_text, time_text
from rota.core.timeline import Timeline

#: What the characters of charts and units become where the output's encoding has none of them.
_ASCII = str.maketrans(
    {"─": "-", "═": "=", "━": "=", "┄": "~", "·": ".", "▸": ">", "µ": "u", "×": "x", "…": "...", "−": "-", "→": "->"}
)
FREE = "Transfers are counted as free; give --link or --links when planning."
_EVERY_S = 5.0  # between lines of progress where there is no terminal


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


def _wants_color() -> bool:
    """Whether this is a terminal with colours and the user does not object (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def transfers_text(placement: Placement) -> str:
    """A line for reports; "" if the placement sends nothing."""
    counted = ", ".join(_counted(placement))
    return f"Included in the times: {counted}." if counted else FREE if placement.routes else ""


def counts_transfers(placement: Placement) -> bool:
    """Whether a transfer of the placement takes time; False if it sends nothing."""
    return any(_counted(placement))


def _counted(placement: Placement) -> Iterator[str]:
    pairs = {(route.sender, route.receiver) for route in placement.routes if not route.is_copy}
    links = [placement.cluster.link_between(*pair) for pair in pairs]
    latencies = [link.latency_us for link in links]
    if any(latencies):
        yield f"latency ({_range(latencies, time_text)})"
    if rates := [link.bytes_per_us * 1_000_000 for link in links if link.bytes_per_us is not None]:
        yield f"rate ({_range(rates, lambda rate: f'{size_text(rate)}/s')})"
    used = [placement.cluster.shared[i] for i in sorted({i for route in placement.routes for i in route.shared})]
    to_hosts = [shared for shared in used if HOST in (*shared.senders, *shared.receivers)]
    if to_hosts:
        rates = [shared.bytes_per_us * 1_000_000 for shared in to_hosts]
        yield f"copies to hosts ({_range(rates, lambda rate: f'{size_text(rate)}/s')})"
    for shared in used:
        if shared in to_hosts:
            continue
        ranks = count_text(len({*shared.senders, *shared.receivers}), "rank")
        yield f"{shared.name} ({ranks} share {size_text(shared.bytes_per_us * 1_000_000)}/s)"


def _range(values: Sequence[int], text: Callable[[int], str]) -> str:
    least, most = min(values), max(values)
    return text(least) if least == most else f"{text(least)} to {text(most)}"


def ascii_form(error: UnicodeError) -> tuple[str, int]:
    """A handler for `codecs.register_error`: characters that cannot be encoded become similar ones of ASCII, or a ?."""
    assert isinstance(error, UnicodeEncodeError)
    wrong = error.object[error.start : error.end].translate(_ASCII)
    return wrong.encode("ascii", "replace").decode(), error.end


@contextmanager
def progress_line(doing: str = "") -> Iterator[Callable[[object], None]]:
    """A function that shows what is being done, first `doing`: on one line of a terminal, which is cleared in the end.

    Other outputs, such as a log, get a line every few seconds at most.
    """
    if sys.stderr.isatty():
        _overwrite(doing)
        try:
            yield _overwrite
        finally:
            _overwrite("")
        return
    shown_s = time.monotonic()

    def show(doing: object) -> None:
        nonlocal shown_s
        if time.monotonic() - shown_s > _EVERY_S:
            shown_s = time.monotonic()
            print(str(doing).strip(), file=sys.stderr, flush=True)

    yield show


def _overwrite(doing: object) -> None:
    print(f"\r\x1b[K{str(doing)[: _columns() - 1]}", end="", file=sys.stderr, flush=True)


def _columns() -> int:
    """The width of the terminal that shows progress: standard output may go elsewhere."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return columns or 80  # some terminals say 0
