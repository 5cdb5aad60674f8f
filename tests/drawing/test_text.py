"""Terminal charts show what the timeline says, in the room they are given; shapes that figures are tested with too."""

import re
import unicodedata
from fractions import Fraction

import pytest
from hypothesis import given, settings, strategies as st

import rota
from rota.core.text import size_text, time_text
from rota.drawing import to_text
from support.sampling import some

GB = 10**9


def timeline(schedule="1f1b", num_stages=4, num_microbatches=8, ranks=None, num_ranks=None, limit=None, **costs):
    costs = rota.Costs.uniform(num_stages, **{"forward_us": 100, "backward_us": 200, "activation_bytes": 0, **costs})
    cluster = rota.Cluster.uniform(num_ranks or num_stages, limit)
    return rota.simulate(rota.schedules.NAMED[schedule](rota.place(costs, cluster, ranks), num_microbatches))


def with_gaps(planned, gap_us=7):
    """As if measured: every op starts late and is a little shorter."""
    starts = tuple(tuple(t + gap_us for t in times) for times in planned.starts_us)
    return rota.Timeline(
        planned.plan, starts, planned.ends_us, planned.sent_us, planned.arrived_us, planned.step_ends_us
    )


def two_stages_per_rank(**costs):
    """A V over two ranks, with split backwards and an end of the step."""
    costs = {"backward_us": 120, "weight_us": 90, "reduce_us": 150, "optimizer_us": 60, **costs}
    return timeline("gpipe", 4, 3, ranks=[0, 1, 1, 0], num_ranks=2, **costs)


def with_recompute():
    task, op = rota.Task, rota.Kind
    tasks = (task(0, op.F, (0,), 100), task(0, op.R, (0,), 100), task(0, op.B, (0,), 200))
    edges = (rota.Edge(0, 1), rota.Edge(1, 2))
    placement = rota.Placement(tasks, edges, rota.Cluster.uniform(1))
    return rota.simulate(rota.schedules.gpipe(placement, 2))


def nothing_takes_time():
    return timeline(forward_us=0, backward_us=0)


SHAPES = {
    "1f1b": timeline,
    "gpipe": lambda: timeline("gpipe", reduce_us=70, optimizer_us=30),
    "uneven, as measured": lambda: with_gaps(timeline(forward_us=130, backward_us=301)),
    "split backward, two stages per rank": two_stages_per_rank,
    "recompute": with_recompute,
    "a rank without ops": lambda: timeline("gpipe", 2, 3, ranks=[0, 2], num_ranks=4),
    "nothing takes time": nothing_takes_time,
}


def columns_of(line):
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else not unicodedata.combining(c) for c in line)


def without_color(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def charts(text):
    """The cells of each rank where the table, of bubbles alone, is beside them."""
    lines = text.splitlines()
    head = next(line for line in lines if line.endswith("bubble"))
    start = head.index("|")
    return [line[start : len(head) - len("  bubble")] for line in lines if line.startswith("rank")]


@settings(max_examples=some(60))
@given(
    schedule=st.sampled_from(["1f1b", "gpipe"]),
    num_stages=st.integers(1, 12),
    num_microbatches=st.integers(1, 24),
    stages_per_rank=st.integers(1, 3),
    width=st.integers(20, 240),
    forward_us=st.integers(0, 10**9),
    backward_us=st.integers(0, 3000),
    costs=st.fixed_dictionaries(
        {
            "weight_us": st.none() | st.integers(0, 500),
            "activation_bytes": st.sampled_from([0, 1, 10**10]),
            "reduce_us": st.sampled_from([0, 400]),
            "optimizer_us": st.sampled_from([0, 90]),
        }
    ),
    limit=st.sampled_from([None, 80 * GB]),
)
def test_no_line_is_wider_than_asked(schedule, num_stages, stages_per_rank, width, limit, costs, **others):
    if stages_per_rank > 1:
        schedule = "gpipe"
    ranks = [stage // stages_per_rank for stage in range(num_stages)]
    num_ranks = ranks[-1] + 1
    shape = timeline(schedule, num_stages, ranks=ranks, num_ranks=num_ranks, limit=limit, **costs, **others)
    text = to_text(shape, width)
    assert max(map(columns_of, text.splitlines())) <= width
    assert sum(line.startswith("rank") for line in text.splitlines()) == num_ranks
    colored = to_text(shape, width, color=True)
    assert without_color(colored) == text
    assert "\x1b[" not in text


@settings(max_examples=some(25))
@given(
    num_microbatches=st.integers(1, 30),
    width=st.integers(60, 300),
    forward_us=st.integers(1, 60),
    backward_us=st.integers(1, 90),
    gap_us=st.integers(0, 9),
)
def test_a_column_is_idle_where_idling_fills_most_of_it(num_microbatches, width, gap_us, **costs):
    planned = timeline(num_stages=3, num_microbatches=num_microbatches, **costs)
    shape = with_gaps(planned, min(gap_us, *costs.values()))
    for rank, cells in enumerate(charts(to_text(shape, width))):
        column_us = Fraction(shape.makespan_us, len(cells))
        spans = [span for span in shape.op_spans() if span.rank == rank]
        for i, cell in enumerate(cells):
            shares = {"F": Fraction(), "B": Fraction()}
            for span in spans:
                start, end = max(span.start_us, i * column_us), min(span.end_us, (i + 1) * column_us)
                shares[span.work.kind] += max(end - start, 0)
            idle = column_us - sum(shares.values())
            assert (cell == "·") == (idle > max(shares.values()))


def test_chart():
    text = to_text(timeline(num_stages=2, num_microbatches=2, activation_bytes=GB, limit=4 * GB), 65)
    assert text.splitlines() == [
        "2 ranks · 2 micro-batches · makespan 900 µs · bubble 33.3%",
        "span 900 µs",
        "",
        "       |0 µs   |200    |400    |600    |800   bubble  peak  limit",
        "rank 0 F0──F1──········B0═══════····B1══════   33.3%  2 GB   4 GB",
        "rank 1 ····F0──B0══════F1───B1══════········   33.3%  1 GB   4 GB",
        "",
        "F─ forward   B═ backward   · idle",
    ]


def test_of_a_long_step_the_beginning_is_drawn_if_it_may_be() -> None:
    long = timeline(num_microbatches=64)
    text = to_text(long, 100, may_cut=True)
    assert "drawn: the first 3.19 ms of 20.1 ms; all of it: rota show PLAN -o plan.html" in text.splitlines()
    top, *_, bottom = charts(text)
    assert re.match(r"F0─?F1─?F2─?F3", top)
    assert re.match(r"·+F0─?B0═+F1─?B1═+F2", bottom)
    assert not re.search(r"\d\d ops not shown", text)
    crowded = timeline(num_microbatches=22)  # 44 ops per rank in 86 columns
    assert "not shown" not in to_text(crowded, 100)
    assert "drawn: the first" in to_text(crowded, 100, may_cut=True)
    few = timeline(num_microbatches=4)
    assert to_text(few, 100, may_cut=True) == to_text(few, 100)
    assert to_text(nothing_takes_time(), may_cut=True)


def test_stages_are_told_where_a_rank_has_several():
    top, bottom = charts(to_text(two_stages_per_rank(), 250))
    for name in ("0F0", "3F2", "3I0", "0W2", "reduce"):
        assert name in top
    assert "1F0" in bottom
    assert "2I1" in bottom
    assert re.search(r"F0.*F2.*I0.*W2.*r", charts(to_text(two_stages_per_rank(), 80))[0])


def test_kinds_differ_without_colour():
    (cells,) = charts(to_text(with_recompute(), 100))
    assert re.fullmatch(r"F0─+F1─+R0~+B0═+R1~+B1═+", cells)


@pytest.mark.parametrize("width", [19, 0, -5])
def test_too_small_a_width_is_refused(width):
    with pytest.raises(rota.RotaError, match=f"{width} columns.*20 or more"):
        to_text(timeline(), width)


def test_times_and_sizes_have_three_digits_and_a_unit():
    times = {0: "0 µs", 999: "999 µs", 1000: "1 ms", 12_345: "12.3 ms", 999_999: "1 s", 3_600_000_000: "3600 s"}
    assert {time_us: time_text(time_us) for time_us in times} == times
    sizes = {0: "0 B", 16: "16 B", 999_600: "1 MB", 81_234_567_890: "81.2 GB", -2000: "-2 kB"}
    assert {num_bytes: size_text(num_bytes) for num_bytes in sizes} == sizes
