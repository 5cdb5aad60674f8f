"""What figures are made of: bars, micro-batch numbers, memory, transfers, the critical path.

Needs Matplotlib and NumPy, and is imported only when something is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
from matplotlib.artist import Artist
from matplotlib.backend_bases import RendererBase
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.font_manager import FontProperties
from matplotlib.text import Text

from rota.core.tasks import Transfer
from rota.core.timeline import Timeline
from rota.drawing.looks import (
    LIMIT_COLOR,
    LOOKS,
    MEMORY_COLOR,
    PATH_COLOR,
    SERVICE_COLOR,
    TRANSFER_COLOR,
    look_key,
    white_shares,
)

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

# Heights are shares of a row's height (rows are 1 apart) or, where that is said, of a bar's.
_HALF_ROW = 0.42
_HALF_LINK = 0.2
_STEP_END = 0.62  # of a bar: from there down, because a reduction may run beside ops, whose numbers stay readable
_MARK = 0.11  # of a bar

_IDLE_COLOR = "#EFEEEB"
_MARK_DARKNESS = 0.38
_DARK = 0.55  # luminance below which white text is easier to read than black

_MAX_SEAMS = 5_000  # with more ops, or with more on one rank, white seams would hide the bars between them
_MAX_SEAMS_PER_RANK = 200
_MAX_TRANSFERS = 1000  # more lines than that hide the bars they join
_MAX_NUMBERS = 4096  # nobody reads more
_FONT_POINTS = (5.0, 6.0, 7.0, 8.0, 9.0)
_MARGIN = 1.3  # of a number's width: the number and the space beside it


class Rows(NamedTuple):
    """Heights around a rank's number, downwards: the bar of its ops, and below it the strip of its memory.

    The strip has no height if no memory is drawn.
    """

    bar_top: float
    bar_bottom: float
    strip_top: float
    strip_bottom: float


ROWS = Rows(-_HALF_ROW, _HALF_ROW, _HALF_ROW, _HALF_ROW)
ROWS_WITH_MEMORY = Rows(-_HALF_ROW, 0.12, 0.18, _HALF_ROW)


# --- bars -------------------------------------------------------------------------------------------------------------


class Ops(NamedTuple):
    """All n ops, rank by rank in execution order, as columns."""

    left: Array  # (n,), µs
    right: Array  # (n,), µs
    ranks: Array  # (n,)
    colors: Array  # (n, 3), RGB from 0 to 1


def op_columns(timeline: Timeline) -> Ops:
    """Return the ops of a timeline as columns."""
    left = np.array([time for times in timeline.starts_us for time in times], float)
    right = np.array([time for times in timeline.ends_us for time in times], float)
    lengths = [len(order) for order in timeline.plan.orders]
    return Ops(left, right, np.repeat(np.arange(timeline.num_ranks, dtype=float), lengths), _op_colors(timeline))


def _op_colors(timeline: Timeline) -> Array:
    """Return the colour of every op's kind, lighter for the later stages of its rank: (n, 3)."""
    colors = []
    for rank, order in enumerate(timeline.plan.orders):
        white = white_shares(timeline.plan.placement.stages_on(rank))
        mixed = {
            (stage, kind): tuple(channel + (1 - channel) * white[stage] for channel in to_rgb(LOOKS[kind].color))
            for stage, kind in {(op.stage, op.kind) for op in order}
        }
        colors += [mixed[stage, kind] for stage, kind, _ in order]
    return np.array(colors, float).reshape(-1, 3)


def op_artist(ops: Ops, rows: Rows) -> PolyCollection:
    """Return the bars of all ops; if they are many, without seams, and in SVG and PDF as pixels."""
    top, bottom, many = ops.ranks + rows.bar_top, ops.ranks + rows.bar_bottom, _has_many(ops)
    return _bars(ops.left, ops.right, top, bottom, ops.colors, seams=not many, rasterized=many)


def _has_many(ops: Ops) -> bool:
    most_on_a_rank = np.bincount(ops.ranks.astype(int), minlength=1).max(initial=0)
    return len(ops.left) > _MAX_SEAMS or bool(most_on_a_rank > _MAX_SEAMS_PER_RANK)


def number_artist(timeline: Timeline, ops: Ops, rows: Rows) -> OpNumbers:
    """Return the micro-batch numbers on the bars."""
    dark = ops.colors @ np.array((0.299, 0.587, 0.114)) < _DARK
    microbatches = [str(op.microbatch) for order in timeline.plan.orders for op in order]
    return OpNumbers(ops.left, ops.right, ops.ranks, rows, microbatches, dark)


def mark_artist(timeline: Timeline, ops: Ops, rows: Rows) -> PolyCollection | None:
    """Return dark lines along bars, by kind: a second cue beside the colour. None if ops are many."""
    if _has_many(ops):
        return None
    marks = [LOOKS[op.kind].marks for order in timeline.plan.orders for op in order]
    height = _MARK * (rows.bar_bottom - rows.bar_top)
    boxes = []
    for edge, top in (("top", rows.bar_top), ("bottom", rows.bar_bottom - height)):
        marked = np.array([edge in op_marks for op_marks in marks], bool)
        ranks = ops.ranks[marked]
        boxes.append(_boxes(ops.left[marked], ops.right[marked], ranks + top, ranks + top + height))
    corners: Any = np.concatenate(boxes)
    color = (0, 0, 0, _MARK_DARKNESS)
    return PolyCollection(corners, facecolors=color, edgecolors="none", antialiaseds=False, zorder=1.2)


def row_artist(timeline: Timeline, rows: Rows) -> PolyCollection:
    """Return one pale band per rank, which is visible where the rank is idle."""
    ranks = np.arange(timeline.num_ranks, dtype=float)
    left, right = np.zeros_like(ranks), np.full_like(ranks, timeline.makespan_us)
    top, bottom = ranks + rows.bar_top, ranks + rows.bar_bottom
    return _bars(left, right, top, bottom, _IDLE_COLOR, seams=False, zorder=0.9)


def step_end_artist(timeline: Timeline, rows: Rows) -> PolyCollection:
    """Return reductions and optimizer steps, as strips along the lower edge of the bars."""
    spans = list(timeline.step_end_spans())
    left, right = np.array([(span.start_us, span.end_us) for span in spans], float).reshape(-1, 2).T
    ranks = np.array([span.rank for span in spans], float)
    colors = [to_rgb(LOOKS[look_key(span.work)].color) for span in spans]
    top = rows.bar_top + _STEP_END * (rows.bar_bottom - rows.bar_top)
    return _bars(left, right, ranks + top, ranks + rows.bar_bottom, colors, seams=True, zorder=1.5)


def _bars(
    left: Array, right: Array, top: Array, bottom: Array, colors: Any, seams: bool, **settings: Any
) -> PolyCollection:
    """Return filled boxes; `seams` draws white lines between them."""
    settings |= {"facecolors": colors, "edgecolors": "white" if seams else "none", "antialiaseds": seams}
    return PolyCollection(_boxes(left, right, top, bottom), linewidths=0.6, **settings)


def _boxes(left: Array, right: Array, top: Array, bottom: Array) -> Any:
    return np.stack([np.stack([left, right, right, left], 1), np.stack([top, top, bottom, bottom], 1)], 2)


# --- micro-batch numbers ----------------------------------------------------------------------------------------------


@final
class OpNumbers(Artist):
    """Writes each op's micro-batch into its bar if the bar is wide and high enough, at any size and zoom."""

    zorder = 4

    def __init__(self, left: Array, right: Array, ranks: Array, rows: Rows, numbers: Sequence[str], dark: Mask) -> None:
        super().__init__()
        middle = ranks + (rows.bar_top + rows.bar_bottom) / 2
        self._rows = rows
        self._middles = np.stack([(left + right) / 2, middle], 1)
        self._ends = np.stack([right, middle], 1)
        self._numbers = numbers
        self._num_digits = np.array([len(number) for number in numbers], int)
        self._dark = dark
        self.set_in_layout(False)

    def fitting(self, renderer: RendererBase) -> tuple[float, npt.NDArray[np.intp]]:
        """Return the largest font size, in points, at which the most numbers fit, and the indices of these."""
        assert self.axes is not None
        to_pixels = self.axes.transData.transform
        middles = to_pixels(self._middles)
        widths = 2 * abs(to_pixels(self._ends) - middles)[:, 0]
        height = abs(to_pixels((0, self._rows.bar_bottom)) - to_pixels((0, self._rows.bar_top)))[1]
        low, high = self.axes.bbox.get_points()
        in_view = ((low <= middles) & (middles <= high)).all(1)
        samples = ["0" * count for count in range(1, self._num_digits.max(initial=0) + 1)]
        best, indices = _FONT_POINTS[0], np.arange(0)
        for points in _FONT_POINTS:
            font = FontProperties(size=points)
            sizes = [renderer.get_text_width_height_descent(sample, font, False) for sample in samples]
            needed = np.array([0.0] + [_MARGIN * size[0] for size in sizes])[self._num_digits]
            high_enough = all(size[1] < height for size in sizes)
            fits = np.flatnonzero(in_view & (needed <= widths)) if high_enough else np.arange(0)
            if len(fits) >= len(indices):
                best, indices = points, fits
        return best, indices if len(indices) <= _MAX_NUMBERS else indices[:0]

    def draw(self, renderer: RendererBase) -> None:
        """Draw the numbers that fit."""
        if not self.get_visible():
            return
        assert self.axes is not None
        assert self.figure is not None
        points, indices = self.fitting(renderer)
        text = Text(fontsize=points, ha="center", va="center_baseline", transform=self.axes.transData)
        text.set_figure(self.figure)
        for i in indices:
            text.set_position(self._middles[i])
            text.set_text(self._numbers[i])
            text.set_color("white" if self._dark[i] else "black")
            text.draw(renderer)


# --- memory, transfers, the critical path -----------------------------------------------------------------------------


def memory_artist(timeline: Timeline, ops: Ops, rows: Rows) -> PolyCollection:
    """Return each rank's memory over time as a filled curve in its strip; strips are as high as the highest value."""
    curves = []
    for rank in range(timeline.num_ranks):
        curve = timeline.memory(rank)
        times, levels = np.array([*curve, (timeline.makespan_us, curve[-1][1])], float).T
        times, levels = np.repeat(times, 2)[1:], np.repeat(levels, 2)[:-1]  # steps
        bottom = rank + rows.strip_bottom
        base = np.array([(times[-1], bottom), (times[0], bottom)])
        curves.append(np.concatenate([np.stack([times, _height(timeline, rows, rank, levels)], 1), base]))
    return PolyCollection(curves, facecolors=MEMORY_COLOR, edgecolors="none", rasterized=_has_many(ops))


def limit_artist(timeline: Timeline, rows: Rows) -> LineCollection:
    """Return each rank's memory limit, if it has one, as a dotted line in its strip."""
    limits = enumerate(timeline.plan.placement.cluster.limit_bytes)
    heights = [_height(timeline, rows, rank, limit) for rank, limit in limits if limit is not None]
    lines = [[(0, y), (timeline.makespan_us, y)] for y in heights]
    return LineCollection(lines, colors=LIMIT_COLOR, linewidths=0.7, linestyles=[(0, (2, 3))])


def _height(timeline: Timeline, rows: Rows, rank: int, num_bytes: Any) -> Any:
    """Return y in a rank's strip; the highest of all peaks and limits is at its top."""
    limits = timeline.plan.placement.cluster.limit_bytes
    highest = max(*timeline.peak_memory_bytes, *(limit for limit in limits if limit is not None), 1)
    return rank + rows.strip_bottom - (rows.strip_bottom - rows.strip_top) * num_bytes / highest


def transfer_artist(timeline: Timeline, rows: Rows) -> LineCollection | None:
    """Return thin lines from bar to bar; None if no transfer has a duration, or there are too many to tell apart."""
    if sum(map(len, timeline.sent_us)) > _MAX_TRANSFERS:
        return None
    lines = []
    for route, sent, arrived in zip(timeline.plan.placement.routes, timeline.sent_us, timeline.arrived_us, strict=True):
        if route.is_copy:  # its link has a row of its own
            continue
        down = route.receiver > route.sender
        from_y = route.sender + (rows.bar_bottom if down else rows.bar_top)
        to_y = route.receiver + (rows.bar_top if down else rows.bar_bottom)
        lines += [[(a, from_y), (b, to_y)] for a, b in zip(sent, arrived, strict=True) if b > a]
    return LineCollection(lines, colors=TRANSFER_COLOR, linewidths=0.6, zorder=2) if lines else None


def service_artist(timeline: Timeline) -> PolyCollection | None:
    """Return a row per shared link below the ranks: pale, and dark while it serves; None if there are no such links."""
    num_links = len(timeline.plan.placement.cluster.shared)
    if not num_links:
        return None
    bars = [(0, timeline.makespan_us, link, _IDLE_COLOR) for link in range(num_links)]
    for link in range(num_links):
        bars += [(span.start_us, span.end_us, link, SERVICE_COLOR) for span in timeline.service_spans(link)]
    lefts, rights, links, colors = zip(*bars, strict=True)
    middle = np.array(links, float) + timeline.num_ranks
    left, right = np.array(lefts, float), np.array(rights, float)
    return _bars(left, right, middle - _HALF_LINK, middle + _HALF_LINK, colors, seams=False)


def path_artist(timeline: Timeline, rows: Rows) -> LineCollection:
    """Return a line along the upper edges of the critical path's bars, slanted from rank to rank."""
    corners = [
        (time, span.rank + rows.bar_top)
        for span in timeline.critical_path()
        if not isinstance(span.work, Transfer)  # a transfer is between ranks
        for time in (span.start_us, span.end_us)
    ]
    return LineCollection([corners] if corners else [], colors=PATH_COLOR, linewidths=1.4, zorder=3)
