"""A timeline as a figure: one row per rank, one bar per op. Matplotlib is imported only when something is drawn."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from rota.core.errors import RotaError
from rota.core.plan import Plan
from rota.core.simulation import timeline_of
from rota.core.text import size_text, time_unit
from rota.core.timeline import Timeline
from rota.drawing.looks import LOOKS, MEMORY_COLOR, PATH_COLOR, SERVICE_COLOR, look_keys, utilisation
from rota.drawing.text import summary

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_LABEL = "_rota"  # of our artists; the underscore keeps them out of legends
_TIME_LABEL = "time ({})"
_MOST_LETTERS = 16  # of a shared link's name
_LEGEND_POINTS = 9.0
_LEGEND_LINE_POINTS = 1.6 * _LEGEND_POINTS  # from one line of the legend to the next


def draw(
    timeline: Timeline | Plan,
    ax: Axes | None = None,
    *,
    title: str | None = None,
    bound_us: float | None = None,
    memory: bool = True,
    transfers: bool = True,
    critical_path: bool = True,
) -> Axes:
    """Draw a timeline, and replace what an earlier call drew on the same axes.

    The x axis counts µs, whatever unit its ticks are written in. Every artist has a gid, such as "ops".

    Args:
        timeline: What to draw. A plan is simulated first.
        ax: The axes to draw on. None: new ones, on a new pyplot figure.
        title: A line above the summary.
        bound_us: A proven lower bound of the makespan, such as a search returns; the title shows the gap to it.
        memory: Whether to draw the memory of each rank, and its limit.
        transfers: Whether to draw lines for transfers. They are left out if there are more than 1,000.
        critical_path: Whether to draw the critical path.

    Returns:
        The axes that were drawn on.

    Raises:
        RotaError: If Matplotlib is missing.
    """
    require_matplotlib()
    timeline = timeline_of(timeline)
    from rota.drawing import artists

    if ax is None:
        from matplotlib import pyplot

        _, ax = pyplot.subplots(figsize=figure_inches(timeline), layout="constrained")
    for artist in [*ax.collections, *ax.artists]:
        if artist.get_label() == _LABEL:
            artist.remove()
    memory = memory and any(timeline.peak_memory_bytes)
    rows = artists.ROWS_WITH_MEMORY if memory else artists.ROWS
    ops = artists.op_columns(timeline)
    drawn: dict[str, Artist | None] = {
        "idle": artists.row_artist(timeline, rows),
        "ops": artists.op_artist(ops, rows),
        "marks": artists.mark_artist(timeline, ops, rows),
        "step ends": artists.step_end_artist(timeline, rows),
        "numbers": artists.number_artist(timeline, ops, rows),
        "memory": artists.memory_artist(timeline, ops, rows) if memory else None,
        "limits": artists.limit_artist(timeline, rows) if memory else None,
        "transfers": artists.transfer_artist(timeline, rows) if transfers else None,
        "shared links": artists.service_artist(timeline),
        "critical path": artists.path_artist(timeline, rows) if critical_path else None,
    }
    for name, new_artist in drawn.items():
        if new_artist is not None:
            _add(ax, new_artist, name)
    _set_time_axis(ax, timeline.makespan_us)
    _set_rank_axis(ax, timeline)
    num_legend_lines = _set_legend(ax, timeline, memory, critical_path)
    text = summary(timeline, bound_us)
    ax.set_title(f"{title}\n{text}" if title else text, loc="left", pad=6 + num_legend_lines * _LEGEND_LINE_POINTS)
    return ax


def require_matplotlib() -> None:
    """Raise RotaError, with the remedy, if Matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise RotaError("drawing needs Matplotlib, which is not installed: pip install 'rota[draw]'")


def figure_inches(timeline: Timeline) -> tuple[float, float]:
    """Return the width and height that suit a timeline; with many ranks, rows get thinner."""
    num_ranks, num_links = timeline.num_ranks, len(timeline.plan.placement.cluster.shared)
    row = 0.75 if any(timeline.peak_memory_bytes) else 0.45
    num_rows = num_ranks + num_links
    return 12.0, 1.3 + min(row * num_ranks + 0.45 * num_links, 2.4 + 0.16 * num_rows, 20.0)


def _add(ax: Axes, artist: Artist, name: str) -> None:
    """Add an artist under a name, without a change to the limits of the axes."""
    from matplotlib.collections import Collection

    artist.set_label(_LABEL)
    artist.set_gid(name)  # the group's id in SVG
    if isinstance(artist, Collection):
        ax.add_collection(artist, autolim=False)
    else:
        ax.add_artist(artist)


def _set_time_axis(ax: Axes, makespan_us: int) -> None:
    """Set limits and ticks; axes that share their x axis show the longest of their timelines, all in one unit."""
    ax.relim()
    ax.update_datalim([(0, 0), (makespan_us or 1, 0)])
    ax.set_xmargin(0)
    ax.autoscale_view(scaley=False)
    unit_us, unit = time_unit(round(ax.get_xlim()[1]))
    ax.xaxis.set_major_formatter(lambda x, _: f"{x / unit_us:.9g}")
    ax.set_xlabel(_TIME_LABEL.format(unit))
    for other in ax.get_shared_x_axes().get_siblings(ax):
        if other.get_xlabel() in map(_TIME_LABEL.format, ("µs", "ms", "s")):
            other.set_xlabel(_TIME_LABEL.format(unit))


def _set_rank_axis(ax: Axes, timeline: Timeline) -> None:
    """Put rank 0 on top, and shared links below; label every row that fits, or every second, fourth or later rank."""
    links = utilisation(timeline)
    num_rows = timeline.num_ranks + len(links)
    row_points = ax.get_window_extent().height / num_rows * 72 / ax.figure.dpi
    step = 1
    while step * row_points < 12 and step < timeline.num_ranks:
        step *= 2
    peaks = timeline.peak_memory_bytes
    ranks = range(0, timeline.num_ranks, step)
    labels = [f"rank {rank} · {size_text(peaks[rank])}" if any(peaks) else f"rank {rank}" for rank in ranks]
    labels += [f"{_shortened(name)} · {busy:.0%} busy" for name, busy in links]
    ax.set_ylim(num_rows - 0.5, -0.5)
    ax.set_yticks([*ranks, *range(timeline.num_ranks, num_rows)], labels)
    ax.tick_params(axis="y", length=0)
    for side in ("left", "top", "right"):
        ax.spines[side].set_visible(False)


def _shortened(name: str) -> str:
    return name if len(name) <= _MOST_LETTERS else name[: _MOST_LETTERS - 1] + "…"


def _set_legend(ax: Axes, timeline: Timeline, memory: bool, critical_path: bool) -> int:
    """Set the legend above the axes, and return its number of lines."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    colors = {f"{key} " * (len(key) == 1) + LOOKS[key].word: LOOKS[key].color for key in look_keys(timeline)}
    placement = timeline.plan.placement
    if any(len(placement.stages_on(rank)) > 1 for rank in range(timeline.num_ranks)):
        colors["paler: a later stage"] = "none"
    if memory:
        limited = any(limit is not None for limit in placement.cluster.limit_bytes)
        colors["memory, limit dotted" if limited else "memory"] = MEMORY_COLOR
    if placement.cluster.shared:
        colors["a shared link is busy"] = SERVICE_COLOR
    entries: list[Patch | Line2D] = [Patch(color=color, label=text) for text, color in colors.items()]
    if critical_path:
        entries.append(Line2D([], [], color=PATH_COLOR, linewidth=1.4, label="critical path"))
    widths = [0.6 * len(str(entry.get_label())) + 3 for entry in entries]  # in font sizes, like `width`
    width = ax.get_window_extent().width * 72 / ax.figure.dpi / _LEGEND_POINTS
    num_columns = len(entries) if sum(widths) <= width else max(1, int(width / max(widths)))
    ax.legend(
        handles=entries,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=num_columns,
        fontsize=_LEGEND_POINTS,
        frameon=False,
        borderpad=0,
        borderaxespad=0.4,
        handlelength=1,
        handleheight=1,
        columnspacing=1.6,
    )
    return -(-len(entries) // num_columns)
