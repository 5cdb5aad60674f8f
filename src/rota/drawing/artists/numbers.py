"""Micro-batch numbers on bars, where they fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import numpy.typing as npt
from matplotlib.artist import Artist
from matplotlib.backend_bases import RendererBase
from matplotlib.font_manager import FontProperties
from matplotlib.text import Text

from rota.drawing.artists.rows import Array, Mask, Rows

_FONT_POINTS = (5.0, 6.0, 7.0, 8.0, 9.0)
_MARGIN = 1.3  # a number's width and the room beside it
_MAX_NUMBERS = 4096  # more than that nobody reads


@final
class OpNumbers(Artist):
    """Writes each op's micro-batch into its bar where that is wide and high enough, at any size and zoom."""

    zorder = 4

    def __init__(self, left: Array, right: Array, ranks: Array, rows: Rows, numbers: Sequence[str], dark: Mask) -> None:
        super().__init__()
        middle = ranks + (rows.bar_top + rows.bar_bottom) / 2
        self._rows = rows
        self._middles = np.stack([(left + right) / 2, middle], 1)
        self._ends = np.stack([right, middle], 1)
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
        height = abs(to_pixels((0, self._rows.bar_bottom)) - to_pixels((0, self._rows.bar_top)))[1]
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
