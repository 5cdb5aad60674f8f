"""What colours and lines of a figure mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rota.drawing.looks import LOOKS, MEMORY_COLOR, PATH_COLOR, shown
from rota.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS = 9.0
LINE = 1.6 * _POINTS  # from one line of the legend to the next


def set_legend(ax: Axes, timeline: Timeline, memory: bool, critical_path: bool) -> int:
    """What the colours mean, in a line or more above the axes; how many."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    words = {f"{key} " * (len(key) == 1) + LOOKS[key].word: LOOKS[key].color for key in shown(timeline)}
    placement = timeline.plan.placement
    if any(len(placement.stages_on(rank)) > 1 for rank in range(timeline.num_ranks)):
        words["paler: a later stage"] = "none"
    if memory:
        limited = any(limit is not None for limit in placement.cluster.limit_bytes)
        words["memory, limit dotted" if limited else "memory"] = MEMORY_COLOR
    entries: list[Patch | Line2D] = [Patch(color=color, label=text) for text, color in words.items()]
    if critical_path:
        entries.append(Line2D([], [], color=PATH_COLOR, linewidth=1.4, label="critical path"))
    widths = [0.6 * len(str(entry.get_label())) + 3 for entry in entries]  # in font sizes, like `room`
    room = ax.get_window_extent().width * 72 / ax.figure.dpi / _POINTS
    columns = len(entries) if sum(widths) <= room else max(1, int(room / max(widths)))
    ax.legend(
        handles=entries,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        fontsize=_POINTS,
        frameon=False,
        borderpad=0,
        borderaxespad=0.4,
        handlelength=1,
        handleheight=1,
        columnspacing=1.6,
    )
    return -(-len(entries) // columns)
