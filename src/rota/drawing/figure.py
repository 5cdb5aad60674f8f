"""A timeline as a figure: one row a rank, one bar an op. Matplotlib is imported when something is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rota.drawing.looks import LOOKS, shown
from rota.drawing.saving import require_matplotlib, save_drawing
from rota.plan import Plan
from rota.simulation import timeline_of
from rota.timeline import Timeline
from rota.units import size_text, time_text, time_unit

if TYPE_CHECKING:
    import os

    from matplotlib.axes import Axes

_OURS = "_rota"  # the label of our artists; the underscore keeps them out of legends
_TIME_LABEL = "time ({})"
_LEGEND_POINTS = 9.0
_LINE = 1.6 * _LEGEND_POINTS  # from one line of the legend to the next


def draw(timeline: Timeline | Plan, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """Draw on `ax`, in place of what an earlier call drew there; without `ax`, on a new pyplot figure.

    A plan is simulated first. The x axis counts µs, whatever unit its ticks are written in. Raises RotaError where
    Matplotlib is missing.
    """
    require_matplotlib()
    timeline = timeline_of(timeline)
    from rota.drawing.bars import op_artists, row_artist, step_end_artist

    if ax is None:
        from matplotlib import pyplot

        _, ax = pyplot.subplots(figsize=_figure_inches(timeline.num_ranks), layout="constrained")
    for artist in [*ax.collections, *ax.artists]:
        if artist.get_label() == _OURS:
            artist.remove()
    bars, numbers = op_artists(timeline)
    for collection in (row_artist(timeline), bars, step_end_artist(timeline)):
        collection.set_label(_OURS)
        ax.add_collection(collection, autolim=False)
    numbers.set_label(_OURS)
    ax.add_artist(numbers)
    _set_time_axis(ax, timeline.makespan_us)
    _set_rank_axis(ax, timeline)
    legend_lines = _set_legend(ax, timeline)
    told = f"makespan {time_text(timeline.makespan_us)} · bubble {timeline.bubble_fraction:.1%}"
    ax.set_title(f"{title}\n{told}" if title else told, loc="left", pad=6 + legend_lines * _LINE)
    return ax


def save(timeline: Timeline | Plan, path: str | os.PathLike[str], *, title: str | None = None) -> None:
    """`draw` into a PNG, SVG or PDF file, as the suffix says; pyplot is not used. Raises RotaError."""
    timeline = timeline_of(timeline)
    save_drawing(lambda ax: draw(timeline, ax, title=title), _figure_inches(timeline.num_ranks), path)


def _figure_inches(num_ranks: int) -> tuple[float, float]:
    """Rows get thinner where there are many."""
    return 12.0, 1.3 + min(0.45 * num_ranks, 2.4 + 0.16 * num_ranks, 20.0)


def _set_time_axis(ax: Axes, makespan_us: int) -> None:
    """Axes that share their x axis show the longest of their timelines, all in one unit."""
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
    """Rank 0 on top; every row labelled if there is room, else every second, fourth, …"""
    row_points = ax.get_window_extent().height / timeline.num_ranks * 72 / ax.figure.dpi
    every = 1
    while every * row_points < 12 and every < timeline.num_ranks:
        every *= 2
    peaks = timeline.peak_memory_bytes
    ranks = range(0, timeline.num_ranks, every)
    labels = [f"rank {rank} · {size_text(peaks[rank])}" if any(peaks) else f"rank {rank}" for rank in ranks]
    ax.set_ylim(timeline.num_ranks - 0.5, -0.5)
    ax.set_yticks(ranks, labels)
    ax.tick_params(axis="y", length=0)
    for side in ("left", "top", "right"):
        ax.spines[side].set_visible(False)


def _set_legend(ax: Axes, timeline: Timeline) -> int:
    """What the colours mean, in a line or more above the axes; how many."""
    from matplotlib.patches import Patch

    entries = [(f"{key} " * (len(key) == 1) + LOOKS[key].word, LOOKS[key].color) for key in shown(timeline)]
    placement = timeline.plan.placement
    if any(len(placement.stages_on(rank)) > 1 for rank in range(timeline.num_ranks)):
        entries.append(("paler: a later stage", "none"))
    widths = [0.6 * len(text) + 3 for text, _ in entries]  # in font sizes, like `room`
    room = ax.get_window_extent().width * 72 / ax.figure.dpi / _LEGEND_POINTS
    columns = len(entries) if sum(widths) <= room else max(1, int(room / max(widths)))
    ax.legend(
        handles=[Patch(color=color, label=text) for text, color in entries],
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        fontsize=_LEGEND_POINTS,
        frameon=False,
        borderpad=0,
        borderaxespad=0.4,
        handlelength=1,
        handleheight=1,
        columnspacing=1.6,
    )
    return -(-len(entries) // columns)
