"""What goes to the terminal."""

from __future__ import annotations

import os
import shutil
import sys

from rota.timeline import Timeline


def print_timeline(timeline: Timeline, width: int | None = None) -> None:
    """As a chart as wide as the terminal, in colour where there is one."""
    from rota.drawing import to_text

    columns = width or max(shutil.get_terminal_size((100, 24)).columns, 20)
    print(to_text(timeline, columns, color=_wants_color()))


def _wants_color() -> bool:
    """In a terminal that can show it, unless the user says no (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def show_progress(doing: object) -> None:
    """One line in a terminal, overwritten, and "" takes it away; nothing elsewhere, where it would fill a log."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{str(doing)[: _columns() - 1]}", end="", file=sys.stderr, flush=True)


def _columns() -> int:
    """Of the terminal that shows progress: standard output may go elsewhere."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return columns or 80  # some terminals say 0
