"""Timelines into files: figures, and pages for the browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rota.drawing.chrome_trace import to_chrome_trace
from rota.drawing.figure import draw, figure_inches
from rota.drawing.html import Names, default_names, to_html
from rota.drawing.saving import SUFFIXES, save_drawing, suffix_of
from rota.errors import RotaError
from rota.plan import Plan
from rota.reading import short
from rota.simulation import timeline_of
from rota.timeline import Timeline
from rota.writing import write_text

if TYPE_CHECKING:
    import os

    from matplotlib.figure import Figure


def save(
    timeline: Timeline | Plan,
    path: str | os.PathLike[str],
    *,
    above: Timeline | Plan | None = None,
    title: str | None = None,
    names: Names | None = None,
    bound_us: float | None = None,
) -> None:
    """`draw` into a PNG, SVG or PDF file, `to_html` into .html, `to_chrome_trace` into .json, as the suffix says.

    pyplot is not used. A trace has no `title` and takes no other timeline. `above`, `names`, `bound_us`: see `to_html`.
    Raises RotaError for another suffix, or where Matplotlib is missing.
    """
    suffix = suffix_of(path, (*SUFFIXES, ".html", ".json"))
    _refuse_types(timeline, above, names)
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
        save_drawing(lambda figure: draw(timeline, figure.add_subplot(), title=title, bound_us=bound_us), inches, path)
    else:
        _save_both((above, timeline), path, title, names or default_names(above, timeline), bound_us)


def _refuse_types(timeline: object, above: object, names: object) -> None:
    for what, given in (("timeline", timeline), *([("above", above)] if above is not None else [])):
        if not isinstance(given, (Plan, Timeline)):
            raise RotaError(f"{what} is {short(given)}; give a Plan or a Timeline, such as Timeline.from_json(…)")
    if names is not None and not (
        isinstance(names, (tuple, list)) and len(names) == 2 and all(isinstance(name, str) for name in names)
    ):
        raise RotaError(f"names is {short(names)}; give two texts, of the upper and of the lower one")


def _save_both(
    timelines: tuple[Timeline, Timeline],
    path: str | os.PathLike[str],
    title: str | None,
    names: Names,
    bound_us: float | None,
) -> None:
    (width, upper), (_, lower) = map(figure_inches, timelines)

    def draw_both(figure: Figure) -> None:
        axes = figure.subplots(2, 1, sharex=True, height_ratios=[upper, lower])
        for timeline, ax, name, bound in zip(timelines, axes, names, (None, bound_us), strict=True):
            draw(timeline, ax, title=name, bound_us=bound)
        axes[0].set_xlabel("")  # the lower one's
        if title:
            figure.suptitle(title)

    save_drawing(draw_both, (width, upper + lower), path)
