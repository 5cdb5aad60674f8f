"""Figures and files show exactly what the timeline says."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rota
from rota.drawing import draw, save, to_text
from test_drawing_text import GB, SHAPES, timeline, two_stages_a_rank, with_gaps, with_recompute

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

import numpy as np  # noqa: E402
from matplotlib.collections import PolyCollection  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from rota.drawing.bars import HALF, OpNumbers  # noqa: E402


def axes(width=12, height=4):
    return Figure(figsize=(width, height), layout="constrained").add_subplot()


def ours(ax):
    """The collections of one drawing: rows, ops, ends of the step."""
    assert all(isinstance(collection, PolyCollection) for collection in ax.collections)
    rows, ops, ends = ax.collections
    return rows, ops, ends


def boxes(collection):
    """(left, right, top, bottom) of each polygon."""
    corners = [path.vertices[:4] for path in collection.get_paths()]
    return [(c[:, 0].min(), c[:, 0].max(), c[:, 1].min(), c[:, 1].max()) for c in corners]


# --- figures ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=SHAPES)
def shape(request):
    return SHAPES[request.param]()


def test_bars_are_the_spans(shape):
    _, ops, ends = ours(draw(shape, axes()))
    assert boxes(ops) == [(s.start_us, s.end_us, s.rank - HALF, s.rank + HALF) for s in shape.op_spans()]
    strips = [(left, right, round(bottom - HALF)) for left, right, _, bottom in boxes(ends)]
    assert strips == [(s.start_us, s.end_us, s.rank) for s in shape.step_end_spans()]


def test_a_plan_is_simulated(tmp_path):
    drawn = timeline()
    assert boxes(ours(draw(drawn.plan, axes()))[1]) == boxes(ours(draw(drawn, axes()))[1])
    assert to_text(drawn.plan) == to_text(drawn)
    save(drawn.plan, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 2000


def test_every_shape_can_be_saved_and_told(shape, tmp_path):
    save(shape, tmp_path / "shape.png")
    for width in (20, 40, 200):
        assert max(map(len, to_text(shape, width).splitlines())) <= width


def test_rank_0_is_on_top_and_time_starts_at_0():
    ax = draw(with_gaps(timeline()), axes())
    assert ax.get_ylim() == (3.5, -0.5)
    assert ax.get_xlim() == (0, timeline().makespan_us)


def test_title_axis_and_row_labels():
    ax = draw(timeline(activation_bytes=GB), axes(), title="1F1B")
    assert ax.get_title(loc="left") == "1F1B\nmakespan 3.3 ms · bubble 27.3%"
    assert ax.get_xlabel() == "time (ms)"
    assert ax.xaxis.get_major_formatter()(1500, 0) == "1.5"
    assert [label.get_text() for label in ax.get_yticklabels()][:2] == ["rank 0 · 4 GB", "rank 1 · 3 GB"]
    assert draw(timeline(), axes()).get_yticklabels()[0].get_text() == "rank 0"


def test_legend_has_what_occurs():
    def words(shape):
        return [text.get_text() for text in draw(shape, axes()).get_legend().get_texts()]

    assert words(timeline()) == ["F forward", "B backward"]
    assert words(two_stages_a_rank()) == [
        "F forward",
        "I input gradient",
        "W weight gradient",
        "reduce",
        "optimizer",
        "paler: a later stage",
    ]
    assert words(with_recompute()) == ["F forward", "B backward", "R recompute"]


def test_legend_and_title_lie_above_the_bars_one_above_the_other():
    ax = draw(two_stages_a_rank(), axes(4, 4))
    ax.figure.draw_without_rendering()
    legend, title = ax.get_legend().get_window_extent(), ax._left_title.get_window_extent()
    assert ax.bbox.y1 <= legend.y0
    assert legend.y1 <= title.y0
    assert legend.x1 <= ax.figure.bbox.x1


def test_colours_tell_kinds_and_the_stages_of_a_rank():
    drawn = two_stages_a_rank()
    _, ops, _ = ours(draw(drawn, axes()))
    colors = {}
    for span, color in zip(drawn.op_spans(), map(tuple, ops.get_facecolors()), strict=True):
        assert colors.setdefault((span.rank, span.work.stage, span.work.kind), color) == color
    assert len({color for (rank, *_), color in colors.items() if rank == 0}) == 6
    assert sum(colors[0, 0, "F"]) < sum(colors[0, 3, "F"])


def test_drawing_again_replaces_the_first_drawing():
    ax = axes()
    ax.plot([0, 10], [0, 1], label="a line of the user's")
    draw(timeline("gpipe", num_microbatches=16), ax)
    draw(timeline(num_stages=2, num_microbatches=3), ax)
    _, ops, _ = ours(ax)
    assert len(boxes(ops)) == 2 * 2 * 3
    assert len(ax.artists) == 1
    assert len(ax.lines) == 1
    assert ax.get_xlim() == (0, timeline(num_stages=2, num_microbatches=3).makespan_us)
    assert ax.get_ylim() == (1.5, -0.5)


def test_only_the_given_axes_are_touched():
    left, right = Figure().subplots(1, 2)
    before = right.get_xlim(), right.get_title(loc="left"), len(right.get_children())
    assert draw(timeline(), left) is left
    assert (right.get_xlim(), right.get_title(loc="left"), len(right.get_children())) == before


@pytest.mark.parametrize("longer_first", [True, False])
def test_axes_that_share_x_show_the_longer_timeline_in_one_unit(longer_first):
    top, bottom = Figure().subplots(2, 1, sharex=True)
    short, long = timeline(num_microbatches=1, forward_us=50, backward_us=60), timeline()
    assert short.makespan_us < 1000 < long.makespan_us
    for ax, drawn in zip((top, bottom), (long, short) if longer_first else (short, long), strict=True):
        draw(drawn, ax)
    assert top.get_xlim() == bottom.get_xlim() == (0, long.makespan_us)
    assert top.get_xlabel() == bottom.get_xlabel() == "time (ms)"


def test_without_axes_there_is_a_new_pyplot_figure():
    from matplotlib import pyplot

    try:
        before = pyplot.get_fignums()
        ax = draw(timeline())
        assert len(pyplot.get_fignums()) == len(before) + 1
        assert pyplot.gca() is ax
    finally:
        pyplot.close("all")


# --- numbers on the bars ----------------------------------------------------------------------------------------------


def written(ax):
    """Font size, and which ops get their number written, at the figure's present size."""
    ax.figure.draw_without_rendering()
    (numbers,) = ax.artists
    assert isinstance(numbers, OpNumbers)
    points, indices = numbers.fitting(ax.figure._get_renderer())
    return points, set(indices.tolist())


def test_all_numbers_are_written_where_there_is_room():
    points, indices = written(draw(timeline(), axes()))
    assert (points, indices) == (9, set(range(64)))


@pytest.mark.parametrize("width", [3, 5, 8, 12])
@pytest.mark.parametrize("num_microbatches", [8, 20, 120])
def test_numbers_fit_into_their_bars(width, num_microbatches):
    drawn = timeline(num_microbatches=num_microbatches)
    ax = draw(drawn, axes(width))
    points, indices = written(ax)
    spans = list(drawn.op_spans())
    for i in indices:
        text = ax.text(0, 0, str(spans[i].work.microbatch), fontsize=points)
        left, right = ax.transData.transform([(spans[i].start_us, 0), (spans[i].end_us, 0)])[:, 0]
        assert text.get_window_extent().width < right - left
        text.remove()
    assert len(indices) < len(spans) or num_microbatches < 120


def test_zooming_in_makes_room_for_numbers():
    ax = draw(timeline(num_microbatches=200), axes())
    _, before = written(ax)
    ax.set_xlim(0, 1000)
    _, after = written(ax)
    in_sight = {i for i, span in enumerate(timeline(num_microbatches=200).op_spans()) if span.end_us <= 1000}
    assert not in_sight <= before
    assert in_sight <= after
    assert len(after) < 2 * len(in_sight)


def test_flat_rows_and_too_many_numbers_stay_blank():
    assert written(draw(timeline(num_stages=100, num_microbatches=2), axes(40, 3)))[1] == set()
    assert written(draw(timeline("gpipe", 64, 40), axes(300, 30)))[1] == set()


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF"), ("PNG", b"\x89PNG")]
)
def test_save_writes_what_the_suffix_says(tmp_path, suffix, magic):
    path = tmp_path / f"chart.{suffix}"
    save(two_stages_a_rank(), path, title="V")
    assert path.read_bytes().startswith(magic)
    assert path.stat().st_size > 2000
    save(two_stages_a_rank(), str(path))


@pytest.mark.parametrize("name", ["chart.gif", "chart", "png"])
def test_save_refuses_other_suffixes(tmp_path, name):
    with pytest.raises(rota.RotaError, match=rf"{name}'.*\.png, \.svg, \.pdf"):
        save(timeline(), tmp_path / name)
    assert not (tmp_path / name).exists()


def test_missing_matplotlib_is_told_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(rota.RotaError, match=r"pip install 'rota\[draw\]'"):
        draw(timeline())
    with pytest.raises(rota.RotaError, match=r"pip install 'rota\[draw\]'"):
        save(timeline(), tmp_path / "chart.png")
    assert "rank 0" in to_text(timeline())


def test_importing_is_light_and_saving_needs_no_pyplot(tmp_path):
    code = """if True:
        import sys, rota, rota.drawing
        assert not {"matplotlib", "numpy"} & set(sys.modules)
        costs = rota.Costs.uniform(2)
        timeline = rota.simulate(rota.schedules.gpipe(rota.place(costs, rota.Cluster.uniform(2)), 2))
        rota.drawing.to_text(timeline)
        assert not {"matplotlib", "numpy"} & set(sys.modules)
        rota.drawing.save(timeline, sys.argv[1])
        assert "matplotlib.pyplot" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code, tmp_path / "chart.png"], check=True)


def test_65536_ops_are_one_collection_of_pixels(tmp_path):
    drawn = timeline(num_stages=64, num_microbatches=512, forward_us=1000, backward_us=2000)
    ax = draw(drawn, axes())
    _, ops, _ = ours(ax)
    assert len(ops.get_paths()) == 65_536
    assert ops.get_rasterized()
    save(drawn, tmp_path / "large.png")
    assert (tmp_path / "large.png").stat().st_size > 10_000


def test_bars_narrower_than_a_pixel_leave_no_gaps():
    drawn = timeline("1f1b", 1, 5000)
    figure = Figure(figsize=(4, 2), dpi=100)
    ax = draw(drawn, figure.add_axes((0, 0, 1, 0.5)))
    ax.set_axis_off()
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    row = np.asarray(canvas.buffer_rgba())[150, 2:-2, :3]
    assert {tuple(pixel) for pixel in row.tolist()} == {(0, 114, 178), (230, 159, 0)}
