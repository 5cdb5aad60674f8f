"""What is drawn beside and over the bars: memory, transfers, the critical path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.collections import LineCollection, PolyCollection

from rota.drawing.artists.rows import Array, Rows
from rota.drawing.looks import LIMIT_COLOR, MEMORY_COLOR, PATH_COLOR, TRANSFER_COLOR
from rota.plan import Transfer
from rota.timeline import Timeline

_MOST_TRANSFERS = 1000  # more than that hide what they join
_COLUMNS = 2000  # of a memory curve that has more levels than that


def memory_artist(timeline: Timeline, rows: Rows) -> PolyCollection:
    """Each rank's memory over time as a filled curve in its strip, whose height is the most of peaks and limits."""
    curves = []
    for rank in range(timeline.num_ranks):
        times, levels = _stairs(timeline.memory(rank), timeline.makespan_us)
        bottom = rank + rows.strip_bottom
        base = np.array([(times[-1], bottom), (times[0], bottom)])
        curves.append(np.concatenate([np.stack([times, _height(timeline, rows, rank, levels)], 1), base]))
    return PolyCollection(curves, facecolors=MEMORY_COLOR, edgecolors="none")


def limit_artist(timeline: Timeline, rows: Rows) -> LineCollection:
    """Each rank's memory limit, where it has one, as a dotted line in its strip."""
    limits = enumerate(timeline.plan.placement.cluster.limit_bytes)
    heights = [_height(timeline, rows, rank, limit) for rank, limit in limits if limit is not None]
    lines = [[(0, y), (timeline.makespan_us, y)] for y in heights]
    return LineCollection(lines, colors=LIMIT_COLOR, linewidths=0.7, linestyles=[(0, (2, 3))])


def _height(timeline: Timeline, rows: Rows, rank: int, num_bytes: Any) -> Any:
    limits = timeline.plan.placement.cluster.limit_bytes
    full = max(*timeline.peak_memory_bytes, *(limit for limit in limits if limit is not None), 1)
    return rank + rows.strip_bottom - (rows.strip_bottom - rows.strip_top) * num_bytes / full


def _stairs(curve: Sequence[tuple[int, int]], end_us: int) -> tuple[Array, Array]:
    """The corners of a step function; where there are many, of the most that it is in each of equal stretches."""
    times, levels = np.array([*curve, (end_us, curve[-1][1])], float).T
    if len(times) > _COLUMNS:
        edges = np.linspace(0, end_us, _COLUMNS + 1)
        first = np.searchsorted(times, edges[:-1], "right") - 1
        last = np.maximum(np.searchsorted(times, edges[1:], "left"), first + 1)
        levels = np.maximum.reduceat(levels, np.stack([first, last], 1).ravel()[:-1])[::2]
        times, levels = edges, np.append(levels, levels[-1])
    return np.repeat(times, 2)[1:], np.repeat(levels, 2)[:-1]


def transfer_artist(timeline: Timeline, rows: Rows) -> LineCollection | None:
    """Thin lines from bar to bar; None where none takes time, or where they are too many to tell apart."""
    if sum(map(len, timeline.sent_us)) > _MOST_TRANSFERS:
        return None
    lines = []
    for route, sent, arrived in zip(timeline.plan.placement.routes, timeline.sent_us, timeline.arrived_us, strict=True):
        down = route.receiver > route.sender
        from_y = route.sender + (rows.bar_bottom if down else rows.bar_top)
        to_y = route.receiver + (rows.bar_top if down else rows.bar_bottom)
        lines += [[(a, from_y), (b, to_y)] for a, b in zip(sent, arrived, strict=True) if b > a]
    return LineCollection(lines, colors=TRANSFER_COLOR, linewidths=0.6, zorder=2) if lines else None


def path_artist(timeline: Timeline, rows: Rows) -> LineCollection:
    """A line along the upper edges of the critical path's bars, slanted where it goes from rank to rank."""
    corners = [
        (time, span.rank + rows.bar_top)
        for span in timeline.critical_path()
        if not isinstance(span.work, Transfer)  # one lies between the ranks
        for time in (span.start_us, span.end_us)
    ]
    return LineCollection([corners] if corners else [], colors=PATH_COLOR, linewidths=1.4, zorder=3)
