"""Figures of many ops, and two timelines in one figure."""

from __future__ import annotations

import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from drawing.test_figures import axes, part, parts  # noqa: E402
from drawing.test_text import timeline, with_gaps  # noqa: E402
from rota.drawing import draw, save  # noqa: E402


def test_16384_ops_are_pixels_without_seams(tmp_path):
    drawn = timeline(num_stages=64, num_microbatches=128, forward_us=1000, backward_us=2000)
    ax = draw(drawn, axes())
    ops = part(ax, "ops")
    assert ops.get_rasterized()
    assert len(ops.get_edgecolors()) == 0
    assert len(ops.get_paths()) == 16384
    assert "marks" not in parts(ax)
    for suffix in ("png", "svg"):
        save(drawn, tmp_path / f"large.{suffix}")
        assert 10_000 < (tmp_path / f"large.{suffix}").stat().st_size < 2_000_000


def test_two_timelines_are_drawn_one_above_the_other(tmp_path):
    measured = with_gaps(timeline())
    save(measured, tmp_path / "both.png", above=timeline(), title="both")
    save(measured, tmp_path / "one.png")
    heights = [int.from_bytes((tmp_path / f"{name}.png").read_bytes()[20:24]) for name in ("one", "both")]
    assert heights[1] == 2 * heights[0]
