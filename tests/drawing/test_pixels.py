"""Figures of many ops: pixels, as busy as their ranks; and two timelines in one figure."""

from __future__ import annotations

import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

import numpy as np  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from drawing.test_figures import axes, part, parts  # noqa: E402
from drawing.test_text import timeline, with_gaps  # noqa: E402
from rota.drawing import draw, save  # noqa: E402
from rota.drawing.artists import Lanes  # noqa: E402


def test_16384_ops_are_pixels(tmp_path):
    drawn = timeline(num_stages=64, num_microbatches=128, forward_us=1000, backward_us=2000)
    ax = draw(drawn, axes())
    assert isinstance(part(ax, "ops"), Lanes)
    assert "marks" not in parts(ax)
    for suffix in ("png", "svg"):
        save(drawn, tmp_path / f"large.{suffix}")
        assert 10_000 < (tmp_path / f"large.{suffix}").stat().st_size < 2_000_000


def pixels(ax):
    """(height, width, 4) of the axes, as drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(ax.figure)
    canvas.draw()
    low, high = np.round(ax.bbox.get_points()).astype(int)
    rows = np.asarray(canvas.buffer_rgba())[::-1]
    return rows[low[1] : high[1], low[0] : high[0]][::-1].astype(float)


@pytest.mark.parametrize("view", [None, (123_456, 130_001)])
def test_pixels_are_as_busy_as_their_ranks(view):
    drawn = with_gaps(timeline("1f1b", 4, 2000, forward_us=130, backward_us=301))
    figure = Figure(figsize=(9, 4), dpi=100)
    ax = draw(drawn, figure.add_axes((0.1, 0, 0.9, 1)), critical_path=False)
    if view:
        ax.set_xlim(view)
    ax.set_axis_off()
    ax.get_legend().remove()
    part(ax, "numbers").set_visible(False)
    part(ax, "idle").set_color("white")
    image = pixels(ax)
    (start, end), width = ax.get_xlim(), image.shape[1]
    for rank in range(4):
        lane = image[round(image.shape[0] * (rank + 0.1) / 4) : round(image.shape[0] * (rank + 0.9) / 4)]
        blue, orange = np.array([0, 114, 178]), np.array([230, 159, 0])
        # White is idle; what a pixel lacks of it is shared by blue and orange.
        lacking = (255 - lane[..., :3]).mean(0)
        shares, *_ = np.linalg.lstsq(np.stack([255 - blue, 255 - orange], 1).astype(float), lacking.T)
        found = shares.sum(0)
        edges = np.linspace(start, end, width + 1)
        busy = busy_between(drawn, rank, edges)
        assert abs(found.sum() - busy.sum()) < 0.003 * width  # Agg rounds the colours it mixes
        assert abs(found - busy).max() < 0.03


def busy_between(drawn, rank, edges):
    """The busy share of each pixel, op by op."""
    busy = np.zeros(len(edges) - 1)
    for start, end in zip(drawn.starts_us[rank], drawn.ends_us[rank], strict=True):
        busy += np.clip(np.minimum(end, edges[1:]) - np.maximum(start, edges[:-1]), 0, None)
    return busy / np.diff(edges)


def test_two_timelines_are_drawn_one_above_the_other(tmp_path):
    measured = with_gaps(timeline())
    save(measured, tmp_path / "both.png", above=timeline(), title="both")
    save(measured, tmp_path / "one.png")
    heights = [int.from_bytes((tmp_path / f"{name}.png").read_bytes()[20:24]) for name in ("one", "both")]
    assert heights[1] == 2 * heights[0]
