"""A timeline as a figure: one row a rank, one bar an op. Matplotlib is imported when something is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rota.drawing.legend import LINE, set_legend
from rota.drawing.saving import require_matplotlib
from rota.drawing.summary import summary
from rota.plan import Plan
from rota.simulation import timeline_of
from rota.timeline import Timeline
from rota.units import size_text, time_unit

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_OURS = "_rota"  # the label of our artists; the underscore keeps them out of legends
_TIME_LABEL = "time ({})"


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
    """Draw on `ax`, in place of what an earlier call drew there; without `ax`, on a new pyplot figure.

    A plan is simulated first. `bound_us`: no makespan is shorter, such as a search proves; the title tells the gap.
    The x axis counts µs, whatever unit its ticks are written in. Every artist has a gid, such as "ops". Raises
    RotaError where Matplotlib is missing.
    """
    require_matplotlib()
    timeline = timeline_of(timeline)
    from rota.drawing.artists import bars, overlays
    from rota.drawing.artists.rows import PLAIN, WITH_MEMORY

    if ax is None:
        from matplotlib import pyplot

        _, ax = pyplot.subplots(figsize=figure_inches(timeline), layout="constrained")
    for old in [*ax.collections, *ax.artists]:
        if old.get_label() == _OURS:
            old.remove()
    memory = memory and any(timeline.peak_memory_bytes)
    rows = WITH_MEMORY if memory else PLAIN
    ops = bars.op_columns(timeline)
    artists: dict[str, Artist | None] = {
        "idle": bars.row_artist(timeline, rows),
        "ops": bars.op_artist(ops, rows),
        "marks": bars.mark_artist(timeline, ops, rows),
        "step ends": bars.step_end_artist(timeline, rows),
        "numbers": bars.number_artist(timeline, ops, rows),
        "memory": overlays.memory_artist(timeline, rows) if memory else None,
        "limits": overlays.limit_artist(timeline, rows) if memory else None,
        "transfers": overlays.transfer_artist(timeline, rows) if transfers else None,
        "critical path": overlays.path_artist(timeline, rows) if critical_path else None,
    }
    for name, artist in artists.items():
        if artist is not None:
            _add(ax, artist, name)
    _set_time_axis(ax, timeline.makespan_us)
    _set_rank_axis(ax, timeline)
    legend_lines = set_legend(ax, timeline, memory, critical_path)
    told = summary(timeline, bound_us)
    ax.set_title(f"{title}\n{told}" if title else told, loc="left", pad=6 + legend_lines * LINE)
    return ax


def _add(ax: Axes, artist: Artist, name: str) -> None:
    from matplotlib.collections import Collection

    artist.set_label(_OURS)
    artist.set_gid(name)  # the group's id in SVG
    if isinstance(artist, Collection):
        ax.add_collection(artist, autolim=False)
    else:
        ax.add_artist(artist)


def figure_inches(timeline: Timeline) -> tuple[float, float]:
    """Rows get thinner where there are many."""
    count = timeline.num_ranks
    row = 0.75 if any(timeline.peak_memory_bytes) else 0.45
    return 12.0, 1.3 + min(row * count, 2.4 + 0.16 * count, 20.0)


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
