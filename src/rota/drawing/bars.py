"""The artists of a figure: all ops as one collection of boxes, and the numbers written into them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt
from matplotlib.artist import Artist
from matplotlib.backend_bases import RendererBase
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.font_manager import FontProperties
from matplotlib.text import Text

from rota.drawing.looks import LOOKS, key_of
from rota.timeline import Timeline

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

HALF = 0.42  # of a bar's height, in rows
_IDLE_COLOR = "#EFEFEF"
_STRIP = 0.2  # from here down to HALF: a reduction may run beside ops, whose numbers stay readable
_LIGHTEST = 0.5  # how much white the last of a rank's stages gets
_DARK = 0.55  # luminance below which white is easier to read than black
_SEAMS = 200  # ops on a rank up to which bars are set apart: it would hide what is but a pixel wide
_LARGE = 20_000  # ops from which bars are pixels in SVG and PDF too
_FONT_POINTS = (5.0, 6.0, 7.0, 8.0, 9.0)
_MARGIN = 1.3  # a number's width and the room beside it
_MAX_NUMBERS = 4096  # more than that nobody reads


def op_artists(timeline: Timeline) -> tuple[PolyCollection, OpNumbers]:
    """The bars of all ops, rank by rank in execution order, and the micro-batch numbers on them."""
    lengths = [len(order) for order in timeline.plan.orders]
    left = np.array([time for times in timeline.starts_us for time in times], float)
    right = np.array([time for times in timeline.ends_us for time in times], float)
    ranks = np.repeat(np.arange(timeline.num_ranks, dtype=float), lengths)
    colors = _op_colors(timeline)
    bars = _collection(_boxes(left, right, ranks - HALF, ranks + HALF), colors, max(lengths) <= _SEAMS)
    bars.set_rasterized(len(left) > _LARGE)
    microbatches = [str(op.microbatch) for order in timeline.plan.orders for op in order]
    dark = colors @ np.array((0.299, 0.587, 0.114)) < _DARK
    return bars, OpNumbers(left, right, ranks, microbatches, dark)


def row_artist(timeline: Timeline) -> PolyCollection:
    """A pale band a rank, which shows where it is idle."""
    ranks = np.arange(timeline.num_ranks, dtype=float)
    left, right = np.zeros_like(ranks), np.full_like(ranks, timeline.makespan_us)
    return _collection(_boxes(left, right, ranks - HALF, ranks + HALF), _IDLE_COLOR, seams=False)


def step_end_artist(timeline: Timeline) -> PolyCollection:
    """Reductions and optimizer steps, as strips along the lower edge of their rows."""
    spans = list(timeline.step_end_spans())
    left, right = np.array([(span.start_us, span.end_us) for span in spans], float).reshape(-1, 2).T
    ranks = np.array([span.rank for span in spans], float)
    colors = [to_rgb(LOOKS[key_of(span.work)].color) for span in spans]
    strips = _collection(_boxes(left, right, ranks + _STRIP, ranks + HALF), colors, seams=True)
    strips.set_zorder(1.5)
    return strips


def _collection(boxes: Any, colors: Any, seams: bool) -> PolyCollection:
    # Without seams, edges are not smoothed: bars then meet at whole pixels, and none shows idle time between them.
    edges = "white" if seams else "none"
    return PolyCollection(boxes, facecolors=colors, edgecolors=edges, linewidths=0.6, antialiaseds=seams)


def _boxes(left: Array, right: Array, top: Array, bottom: Array) -> Array:
    """The corners of n boxes: (n, 4, 2)."""
    return np.stack([np.stack([left, right, right, left], 1), np.stack([top, top, bottom, bottom], 1)], 2)


def _op_colors(timeline: Timeline) -> Array:
    """The colour of every op's kind, the lighter the higher its stage among those of its rank: (n, 3)."""
    colors = []
    for rank, order in enumerate(timeline.plan.orders):
        stages = timeline.plan.placement.stages_on(rank)
        white = {stage: _LIGHTEST * i / max(1, len(stages) - 1) for i, stage in enumerate(stages)}
        mixed = {
            (stage, kind): tuple(part + (1 - part) * white[stage] for part in to_rgb(LOOKS[kind].color))
            for stage, kind in {(op.stage, op.kind) for op in order}
        }
        colors += [mixed[stage, kind] for stage, kind, _ in order]
    return np.array(colors, float).reshape(-1, 3)


@final
class OpNumbers(Artist):
    """Writes each op's micro-batch into its bar where that is wide and high enough, at any size and zoom."""

    zorder = 2

    def __init__(self, left: Array, right: Array, ranks: Array, numbers: Sequence[str], dark: Mask) -> None:
        super().__init__()
        self._middles = np.stack([(left + right) / 2, ranks], 1)
        self._ends = np.stack([right, ranks], 1)
        self._numbers = numbers
        self._digits = np.array([len(number) for number in numbers], int)
        self._dark = dark
        self.set_in_layout(False)

    def fitting(self, renderer: RendererBase) -> tuple[float, npt.NDArray[np.intp]]:
        """The largest font size, in points, at which as many numbers fit as at the smallest; their indices."""
        assert self.axes is not None
        to_pixels = self.axes.transData.transform
        middles = to_pixels(self._middles)
        widths = 2 * abs(to_pixels(self._ends) - middles)[:, 0]
        height = abs(to_pixels((0, 2 * HALF)) - to_pixels((0, 0)))[1]
        low, high = self.axes.bbox.get_points()
        in_sight = ((low <= middles) & (middles <= high)).all(1)
        samples = ["0" * count for count in range(1, self._digits.max(initial=0) + 1)]
        best, indices = _FONT_POINTS[0], np.arange(0)
        for points in _FONT_POINTS:
            font = FontProperties(size=points)
            sizes = [renderer.get_text_width_height_descent(sample, font, False) for sample in samples]
            needed = np.array([0.0] + [_MARGIN * size[0] for size in sizes])[self._digits]
            high_enough = all(size[1] < height for size in sizes)
            fits = np.flatnonzero(in_sight & (needed <= widths)) if high_enough else np.arange(0)
            if len(fits) >= len(indices):
                best, indices = points, fits
        return best, indices if len(indices) <= _MAX_NUMBERS else indices[:0]

    def draw(self, renderer: RendererBase) -> None:
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
