"""Small pictures for notebooks whose idle time has the color of its cause."""

from __future__ import annotations

from collections.abc import Iterable

from rota.accounting.causes import COLORS, Idle
from rota.accounting.idle_time import idle
from rota.core import notebook
from rota.core.timeline import Timeline


def snippet(
    timeline: Timeline, name: str = "Timeline", until_us: int | None = None, planned: Timeline | None = None
) -> str:
    """The timeline as HTML, from 0 to `until_us` (default: the makespan); `planned` as for `idle`."""
    few = sum(map(len, timeline.plan.orders)) <= notebook.MOST_BARS  # else there are only shares to draw
    return snippet_of(timeline, idle(timeline, planned) if few else (), name, until_us)


def snippet_of(timeline: Timeline, idles: Iterable[Idle], name: str = "Timeline", until_us: int | None = None) -> str:
    """The timeline as HTML, with these causes of its idle time."""
    gaps: list[list[notebook.Gap]] = [[] for _ in range(timeline.num_ranks)]
    for one in idles:
        gaps[one.rank].append(notebook.Gap(one.start_us, one.end_us, str(one.cause), COLORS[one.cause]))
    return timeline.to_snippet(name, until_us, gaps)
