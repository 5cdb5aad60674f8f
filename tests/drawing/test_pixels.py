"""Figures of many ops: an image, as busy as their ranks; and two timelines in one figure."""

from __future__ import annotations

import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

import numpy as np  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from drawing.test_figures import axes, part, parts  # noqa: E402
from drawing.test_text import timeline, with_gaps  # noqa: E402
from rota.drawing import draw, save  # noqa: E402


def test_16384_ops_are_an_image(tmp_path):
    drawn = timeline(num_stages=64, num_microbatches=128, forward_us=1000, backward_us=2000)
    ax = draw(drawn, axes())
    assert part(ax, "ops").get_rasterized()
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


def test_ops_narrower_than_pixels_look_as_busy_as_their_ranks():
    drawn = with_gaps(timeline("1f1b", 4, 2000, forward_us=130, backward_us=301))
    ax = draw(drawn, Figure(figsize=(9, 4), dpi=100).add_axes((0.1, 0, 0.9, 1)), critical_path=False)
    ax.set_axis_off()
    ax.get_legend().remove()
    part(ax, "numbers").set_visible(False)
    part(ax, "idle").set_color("white")
    image = pixels(ax)
    for rank in range(4):
        row = image[round(image.shape[0] * (rank + 0.5) / 4)]
        busy = sum(drawn.ends_us[rank]) - sum(drawn.starts_us[rank])
        assert abs((row[:, :3] < 255).any(1).mean() - busy / drawn.makespan_us) < 0.05


def test_two_timelines_are_drawn_one_above_the_other(tmp_path):
    measured = with_gaps(timeline())
    save(measured, tmp_path / "both.png", above=timeline(), title="both")
    save(measured, tmp_path / "one.png")
    heights = [int.from_bytes((tmp_path / f"{name}.png").read_bytes()[20:24]) for name in ("one", "both")]
    assert heights[1] == 2 * heights[0]
