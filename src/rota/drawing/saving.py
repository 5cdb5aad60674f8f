"""Files: timelines as figures, pages and Chrome traces, and the frontier as a figure. pyplot is not used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from rota.core.errors import RotaError
from rota.core.plan import Plan
from rota.core.simulation import timeline_of
from rota.core.text import SIZE_UNITS, time_unit
from rota.core.timeline import Timeline
from rota.core.writing import whole_file, write_text
from rota.drawing.chrome_trace import to_chrome_trace
from rota.drawing.figure import draw, figure_inches, require_matplotlib
from rota.drawing.html import Names, default_names, to_html

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FIGURES = (".png", ".svg", ".pdf")


def save(
    timeline: Timeline | Plan,
    path: str | PathLike[str],
    *,
    above: Timeline | Plan | None = None,
    title: str | None = None,
    names: Names | None = None,
    bound_us: float | None = None,
) -> None:
    """Save a timeline, in the format that the suffix of `path` names.

    Args:
        timeline: What to save. A plan is simulated first.
        path: A file that ends in .png, .svg or .pdf (`draw`), .html (`to_html`) or .json (`to_chrome_trace`).
        above: A second timeline, drawn above the first with the same time axis. A Chrome trace has no second timeline.
        title: The title. A Chrome trace has none.
        names: Headings of the upper and the lower timeline. None: see `to_html`.
        bound_us: A proven lower bound of the makespan of `timeline`, to show the gap.

    Raises:
        RotaError: If the suffix is another one, or Matplotlib is missing.
    """
    suffix = _suffix(path, (*_FIGURES, ".html", ".json"))
    timeline = timeline_of(timeline)
    above = None if above is None else timeline_of(above)
    if suffix == ".json":
        if above is not None:
            raise RotaError(f"{str(path)!r} is a Chrome trace, which shows one timeline: write two files, or an .html")
        write_text(path, to_chrome_trace(timeline))
    elif suffix == ".html":
        write_text(path, to_html(timeline, above=above, title=title, names=names, bound_us=bound_us))
    elif above is None:
        inches = figure_inches(timeline)
        _save_figure(lambda figure: draw(timeline, figure.add_subplot(), title=title, bound_us=bound_us), inches, path)
    else:
        _save_both((above, timeline), path, title, names or default_names(above, timeline), bound_us)


def save_frontier(
    points: Sequence[tuple[int, float]], bounds: Sequence[tuple[int, float]], path: str | PathLike[str]
) -> None:
    """Save time per micro-batch against the memory limit, as steps: what fits into less memory fits into more.

    Args:
        points: What was found: (memory limit in bytes, µs per micro-batch), by rising limit.
        bounds: Proven lower bounds, in the same form.
        path: A file that ends in .png, .svg or .pdf.

    Raises:
        RotaError: If Matplotlib is missing, or the suffix is another one.
    """
    unit_us, time_name = time_unit(round(max(us for _, us in points)))
    largest_bytes = max(limit for limit, _ in [*points, *bounds])
    unit_bytes, size_name = next((unit for unit in SIZE_UNITS if largest_bytes >= unit[0]), SIZE_UNITS[-1])
    end_bytes = largest_bytes * 1.08  # how far the last step extends

    def draw_on(figure: Figure) -> None:
        ax = figure.add_subplot()
        for curve, color, label in (
            (points, "#0072B2", "found"),
            (bounds, "#999999", "lower bound of the steady state"),
        ):
            limits, times = zip(*curve, (end_bytes, curve[-1][1]), strict=True)
            x, y = [limit / unit_bytes for limit in limits], [us / unit_us for us in times]
            ax.step(x, y, where="post", color=color, label=label)
            if curve is points:
                ax.plot(x[:-1], y[:-1], "o", color=color, markersize=4)
        ax.set_xlabel(f"memory limit per rank ({size_name})")
        ax.set_ylabel(f"time per micro-batch ({time_name})")
        ax.set_ylim(bottom=0)
        ax.grid(alpha=0.3)
        ax.legend(frameon=False)

    _save_figure(draw_on, (8.0, 4.5), path)


def _save_figure(draw_on: Callable[[Figure], object], inches: tuple[float, float], path: str | PathLike[str]) -> None:
    suffix = _suffix(path, _FIGURES)
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained")
    draw_on(figure)
    with whole_file(path) as partial:
        figure.savefig(partial, format=suffix[1:], dpi=150)


def _suffix(path: str | PathLike[str], suffixes: tuple[str, ...]) -> str:
    suffix = Path(path).suffix.lower()
    if suffix not in suffixes:
        raise RotaError(f"the name {str(path)!r} names no known format; use one that ends in {', '.join(suffixes)}")
    return suffix


def _save_both(
    timelines: tuple[Timeline, Timeline],
    path: str | PathLike[str],
    title: str | None,
    names: Names,
    bound_us: float | None,
) -> None:
    """Save two timelines as one figure, with one time axis."""
    (width, upper), (_, lower) = map(figure_inches, timelines)

    def draw_both(figure: Figure) -> None:
        axes = figure.subplots(2, 1, sharex=True, height_ratios=[upper, lower])
        for timeline, ax, name, bound in zip(timelines, axes, names, (None, bound_us), strict=True):
            draw(timeline, ax, title=name, bound_us=bound)
        axes[0].set_xlabel("")  # the lower axes have it
        if title:
            figure.suptitle(title)

    _save_figure(draw_both, (width, upper + lower), path)
