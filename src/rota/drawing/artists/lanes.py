"""Many ops as pixels: each rank's row is an image, made for the very pixels that are drawn."""

from __future__ import annotations

from typing import Any, final

import numpy as np
import numpy.typing as npt
from matplotlib.artist import Artist, allow_rasterization
from matplotlib.backend_bases import RendererBase

from rota.drawing.artists.rows import Array, Rows

_SHADES = 255


@final
class Lanes(Artist):
    """At every size and zoom a pixel is as opaque as its rank is busy in the pixel's time, exactly.

    Where ops share a pixel, its column is divided into their colours as its time is.
    """

    zorder = 1

    def __init__(self, left: Array, right: Array, ranks: Array, colors: Array, rows: Rows) -> None:
        super().__init__()
        self._rows = rows
        self._lanes = {
            int(rank): _Lane(left[here], right[here], colors[here])
            for rank in np.unique(ranks)
            for here in [ranks == rank]
        }
        self.set_rasterized(True)
        self.set_in_layout(False)

    def busy(self, rank: int, times_us: Array) -> Array:
        """The share of each interval between `times_us` in which the rank runs ops: (len(times_us) - 1,)."""
        busy: Array = self._lanes[rank].parts(times_us).sum(1)
        return busy / np.diff(times_us)

    @allow_rasterization  # type: ignore[untyped-decorator]
    def draw(self, renderer: RendererBase) -> None:
        if not self.get_visible():
            return
        assert self.axes is not None
        to_pixels = self.axes.transData
        low, high = np.round(self.axes.bbox.get_points()).astype(int)
        edges = np.arange(low[0], high[0] + 1, dtype=float)
        times = to_pixels.inverted().transform(np.stack([edges, np.zeros_like(edges)], 1))[:, 0]
        context = renderer.new_gc()
        context.set_clip_rectangle(self.axes.bbox)
        for rank, lane in self._lanes.items():
            heights = to_pixels.transform([(0, rank + self._rows.bar_top), (0, rank + self._rows.bar_bottom)])[:, 1]
            bottom, top = np.round(np.sort(heights)).astype(int)
            if top <= low[1] or bottom >= high[1] or top == bottom:
                continue
            image = lane.image(times, top - bottom)
            upside = image if heights[0] < heights[1] else image[::-1]  # a renderer's first row is the lowest
            renderer.draw_image(context, low[0], bottom, np.ascontiguousarray(upside))
        context.restore()


@final
class _Lane:
    """One rank's ops: for each colour the time that it takes up to each start and end."""

    def __init__(self, left: Array, right: Array, colors: Array) -> None:
        self.colors, styles = np.unique(colors, axis=0, return_inverse=True)
        self._times = np.stack([left, right], 1).ravel()
        durations = np.zeros((len(left), len(self.colors)))
        durations[np.arange(len(left)), styles.ravel()] = right - left
        after = durations.cumsum(0)
        self._taken = np.stack([after - durations, after], 1).reshape(len(self._times), -1)

    def parts(self, times: Array) -> Array:
        """The time that each colour takes between each two `times`: (len(times) - 1, colours)."""
        columns = [np.interp(times, self._times, column) for column in self._taken.T]
        return np.diff(np.stack(columns, 1), axis=0)

    def image(self, times: Array, height: int) -> npt.NDArray[np.uint8]:
        """RGBA, its first row on top: (height, pixels, 4)."""
        parts = self.parts(times)
        busy = parts.sum(1)
        edges = parts.cumsum(1) / np.where(busy > 0, busy, 1)[:, None]
        middles = (np.arange(height) + 0.5) / height
        style: Any = (edges[None, :, :-1] <= middles[:, None, None]).sum(2)
        image = np.empty((height, len(busy), 4), np.uint8)
        image[..., :3] = np.round(_SHADES * self.colors)[style]
        shares = np.clip(busy / np.abs(np.diff(times)), 0, 1)
        # What rounding leaves out of one pixel goes to the next: over any stretch it does not add up.
        image[..., 3] = np.diff(np.floor(_SHADES * shares.cumsum() + 0.5), prepend=0).clip(0, _SHADES)
        return image
