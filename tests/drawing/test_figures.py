"""Figures and files show exactly what the timeline says."""

import subprocess
import sys

import pytest

import rota
from drawing.browser.timelines import wired
from drawing.test_text import GB, SHAPES, timeline, two_stages_per_rank, with_gaps, with_recompute
from rota.drawing import draw, save, to_text

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from matplotlib.figure import Figure  # noqa: E402

from rota.drawing.artists import ROWS, ROWS_WITH_MEMORY  # noqa: E402
from rota.drawing.looks import LOOKS  # noqa: E402


def axes(width=12, height=4):
    return Figure(figsize=(width, height), layout="constrained").add_subplot()


def part(ax, name):
    """The one artist of a drawing that has a name."""
    (artist,) = (artist for artist in [*ax.collections, *ax.artists] if artist.get_gid() == name)
    return artist


def parts(ax):
    return [artist.get_gid() for artist in [*ax.collections, *ax.artists]]


def rows_of(shape):
    return ROWS_WITH_MEMORY if any(shape.peak_memory_bytes) else ROWS


def boxes(collection):
    """(left, right, top, bottom) of each polygon."""
    corners = [path.vertices[:4] for path in collection.get_paths()]
    return [(c[:, 0].min(), c[:, 0].max(), c[:, 1].min(), c[:, 1].max()) for c in corners]


def test_shared_links_are_rows_below_the_ranks():
    shape, ax = wired(), axes()
    draw(shape, ax=ax)
    rows = boxes(part(ax, "shared links"))
    assert rows[0] == (0, shape.makespan_us, 3.8, 4.2)  # one link, after ranks 0 to 3
    assert [(left, right) for left, right, *_ in rows[1:]] == [(s.start_us, s.end_us) for s in shape.service_spans(0)]
    assert [label.get_text() for label in ax.get_yticklabels()][-1] == "host a · 51% busy"
    assert "shared link host a: 51.3% busy" in to_text(shape)


@pytest.fixture(params=SHAPES)
def shape(request):
    return SHAPES[request.param]()


def test_bars_are_the_spans(shape):
    ax, rows = draw(shape, axes()), rows_of(shape)
    wanted = [(s.start_us, s.end_us, s.rank + rows.bar_top, s.rank + rows.bar_bottom) for s in shape.op_spans()]
    assert boxes(part(ax, "ops")) == wanted
    strips = [(left, right, round(bottom - rows.bar_bottom)) for left, right, _, bottom in boxes(part(ax, "step ends"))]
    assert strips == [(s.start_us, s.end_us, s.rank) for s in shape.step_end_spans()]


def test_marks_lie_on_the_bars_of_their_kinds(shape):
    rows, wanted = rows_of(shape), []
    for place in ("top", "bottom"):
        for span in shape.op_spans():
            if place in LOOKS[span.work.kind].marks:
                wanted.append((span.start_us, span.end_us, place, span.rank))
    found = []
    for left, right, top, bottom in boxes(part(draw(shape, axes()), "marks")):
        rank = round(top - rows.bar_top if abs((top - rows.bar_top) % 1) < 0.01 else bottom - rows.bar_bottom)
        found.append((left, right, "top" if abs(top - rank - rows.bar_top) < 0.01 else "bottom", rank))
    assert found == wanted


def test_memory_is_a_curve_under_each_bar_up_to_its_limit():
    shape = timeline(activation_bytes=GB, limit=8 * GB)
    ax, rows = draw(shape, axes()), ROWS_WITH_MEMORY
    for rank, path in enumerate(part(ax, "memory").get_paths()):
        bottom, high = rank + rows.strip_bottom, rows.strip_bottom - rows.strip_top
        found = {(x, round((bottom - y) / high * 8 * GB)) for x, y in path.vertices}
        assert {(time, level) for time, level in shape.memory(rank)} <= found
        assert {level for _, level in found} == {level for _, level in shape.memory(rank)} | {0}
    limits = part(ax, "limits").get_segments()
    assert [line[:, 0].tolist() for line in limits] == 4 * [[0, shape.makespan_us]]
    assert [line[:, 1].tolist() for line in limits] == [2 * [pytest.approx(rank + rows.strip_top)] for rank in range(4)]
    assert "memory" not in parts(draw(shape, axes(), memory=False))
    assert "memory" not in parts(draw(timeline(), axes()))


def with_transfers():
    costs = rota.Costs.uniform(4, 100, 200, boundary_bytes=100)
    placement = rota.place(costs, rota.Cluster.uniform(4, latency_us=3, bytes_per_us=10))
    return rota.simulate(rota.schedules.one_f_one_b(placement, 8))


def test_transfers_go_from_bar_to_bar():
    shape = with_transfers()
    found = [line.tolist() for line in part(draw(shape, axes()), "transfers").get_segments()]
    rows, wanted = rows_of(shape), []
    for span in shape.transfer_spans():
        down = span.work.receiver > span.work.sender
        upper, lower = (rows.bar_bottom, rows.bar_top) if down else (rows.bar_top, rows.bar_bottom)
        wanted.append([[span.start_us, span.rank + upper], [span.end_us, span.work.receiver + lower]])
    assert found == wanted
    assert "transfers" not in parts(draw(shape, axes(), transfers=False))
    assert "transfers" not in parts(draw(timeline(), axes()))  # none takes time


def test_the_critical_path_runs_from_0_to_the_makespan(shape):
    (line,) = part(draw(shape, axes()), "critical path").get_segments()
    spans = [span for span in shape.critical_path() if not isinstance(span.work, rota.Transfer)]
    assert line[:, 0].tolist() == [time for span in spans for time in (span.start_us, span.end_us)]
    assert line[:, 1].tolist() == [span.rank + rows_of(shape).bar_top for span in spans for _ in range(2)]
    assert line[-1, 0] == shape.makespan_us
    assert "critical path" not in parts(draw(shape, axes(), critical_path=False))


def test_the_title_tells_the_gap_to_the_bound():
    def title(bound_us):
        return draw(timeline(), axes(), bound_us=bound_us).get_title(loc="left")

    assert title(3000) == "makespan 3.3 ms · bubble 27.3% · within 9.1% of the optimum"
    assert title(3300) == "makespan 3.3 ms · bubble 27.3% · proven optimal"


def test_every_shape_can_be_saved(shape, tmp_path):
    save(shape, tmp_path / "shape.png")


def test_legend_has_what_occurs():
    def words(shape):
        return [text.get_text() for text in draw(shape, axes()).get_legend().get_texts()]

    assert words(timeline()) == ["F forward", "B backward", "critical path"]
    split = ["F forward", "I input gradient", "W weight gradient", "reduce", "optimizer"]
    assert words(two_stages_per_rank()) == [*split, "paler: a later stage", "critical path"]
    assert words(timeline(activation_bytes=GB, limit=9 * GB))[2:] == ["memory, limit dotted", "critical path"]
    assert words(with_recompute()) == ["F forward", "B backward", "R recompute", "critical path"]


def test_drawing_again_replaces_the_first_drawing():
    ax = axes()
    ax.plot([0, 10], [0, 1], label="a line of the user's")
    draw(two_stages_per_rank(activation_bytes=GB, limit=20 * GB), ax)
    draw(timeline(num_stages=2, num_microbatches=3), ax)
    assert len(boxes(part(ax, "ops"))) == 2 * 2 * 3
    assert parts(ax) == ["idle", "ops", "marks", "step ends", "critical path", "numbers"]
    assert len(ax.lines) == 1
    assert ax.get_xlim() == (0, timeline(num_stages=2, num_microbatches=3).makespan_us)
    assert ax.get_ylim() == (1.5, -0.5)


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


def written(ax):
    """Font size, and which ops get their number written, at the figure's present size."""
    ax.figure.draw_without_rendering()
    numbers = part(ax, "numbers")
    points, indices = numbers.fitting(ax.figure._get_renderer())
    return points, set(indices.tolist())


@pytest.mark.parametrize("width", [3, 12])
@pytest.mark.parametrize("num_microbatches", [20, 120])
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


@pytest.mark.parametrize(("suffix", "magic"), [("svg", b"<?xml"), ("pdf", b"%PDF"), ("PNG", b"\x89PNG")])
def test_save_writes_what_the_suffix_says(tmp_path, suffix, magic):
    path = tmp_path / f"chart.{suffix}"
    save(two_stages_per_rank(), path, title="V")
    assert path.read_bytes().startswith(magic)
    assert path.stat().st_size > 2000


@pytest.mark.parametrize("name", ["chart.gif", "chart", "png"])
def test_save_refuses_other_suffixes(tmp_path, name):
    with pytest.raises(rota.RotaError, match=rf"{name}'.*\.png, \.svg, \.pdf, \.html"):
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


def test_16384_ops_are_pixels_without_seams(tmp_path):
    drawn = timeline(num_stages=64, num_microbatches=128, forward_us=1000, backward_us=2000)
    ax = draw(drawn, axes())
    ops = part(ax, "ops")
    assert ops.get_rasterized()
    assert len(ops.get_edgecolors()) == 0
    assert len(ops.get_paths()) == 16384
    assert "marks" not in parts(ax)
    save(drawn, tmp_path / "large.svg")
    assert 10_000 < (tmp_path / "large.svg").stat().st_size < 2_000_000


def test_two_timelines_are_drawn_one_above_the_other(tmp_path):
    measured = with_gaps(timeline())
    save(measured, tmp_path / "both.png", above=timeline(), title="both")
    save(measured, tmp_path / "one.png")
    heights = [int.from_bytes((tmp_path / f"{name}.png").read_bytes()[20:24]) for name in ("one", "both")]
    assert heights[1] == 2 * heights[0]
