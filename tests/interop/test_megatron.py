"""Megatron's layouts: its own examples, an independent reading of its rules, and whatever strings there are."""

import re

import pytest
from hypothesis import given, settings, strategies as st

from rota import Cluster, Costs, FormatError, PlacementError, ScheduleError, SplitError, interleaved, place
from rota.interop.megatron import Layout, layout_for, layout_of, plan_of, read_layout, runs_in_this_order, write_layout
from rota.schedules import NAMED
from support.sampling import some

#: Of Megatron-Core's user guide and tests: layout, ranks, (rank, chunk) -> letters, as its documents tell.
EXAMPLES = [
    (
        "Et*3|(tt|)*29,m|L",
        16,
        {(0, 0): "Ettt", (0, 1): "tt", (13, 0): "tt", (13, 1): "tt", (14, 0): "tt", (14, 1): "m", (15, 1): "L"},
    ),
    ("E||t|L", 4, {(0, 0): "E", (1, 0): "", (2, 0): "t", (3, 0): "L"}),
    ("E|t*3|(t|)*5mL", 4, {(0, 0): "E", (1, 0): "ttt", (2, 0): "t", (0, 1): "t", (3, 1): "mL"}),
    ("E|t*3|(t|)*4tm|L", 4, {(2, 1): "tm", (3, 1): "L"}),
    ("E|t*3|(t|)*3tt|m|L", 4, {(1, 1): "tt", (2, 1): "m", (3, 1): "L"}),
]


@pytest.mark.parametrize(("text", "num_ranks", "told"), EXAMPLES)
def test_megatrons_examples(text: str, num_ranks: int, told: dict[tuple[int, int], str]) -> None:
    layout = read_layout(text, num_ranks)
    for (rank, chunk), letters in told.items():
        stage = chunk * num_ranks + rank
        assert layout.stages[stage] == letters
        assert layout.ranks[stage] == rank
    assert read_layout(write_layout(layout), num_ranks, layout.num_virtual) == layout


def as_megatron_reads(text: str) -> list[str]:
    """Commas are taken out, then groups are unrolled from left to right, then single characters."""
    text = text.replace(",", "")
    for multiplied in (r"\((?P<what>[^)]+)\)\*(?P<times>\d+)", r"(?P<what>.)\*(?P<times>\d+)"):
        pieces, end = [], 0
        for match in re.finditer(multiplied, text):
            pieces += [text[end : match.start()], match["what"] * int(match["times"])]
            end = match.end()
        text = "".join([*pieces, text[end:]])
    assert set(text) <= set("EtmL|"), text
    return text.split("|")


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any that Megatron takes: empty stages, MTP in a stage of the last round."""
    num_ranks, num_virtual = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_stages = num_ranks * num_virtual
    stages = ["t" * draw(st.sampled_from([0, 1, 2, 2, 2, 3, 12])) for _ in range(num_stages)]
    if num_mtp := draw(st.integers(0, 3)):
        home = draw(st.integers(num_stages - num_ranks, num_stages - 1))
        stages = [*stages[: home + 1], *[""] * (num_stages - home - 1)]
        stages[home] += "m" * num_mtp
    return Layout(
        ("E" + stages[0], *stages[1:-1], stages[-1] + "L") if num_stages > 1 else (f"E{stages[0]}L",), num_ranks
    )


@given(layouts(), st.data())
def test_what_is_written_is_read_again_by_us_and_by_megatron(layout: Layout, data: st.DataObject) -> None:
    text = write_layout(layout)
    at = data.draw(st.integers(0, len(text)))
    assert as_megatron_reads(text) == [*layout.stages]
    assert read_layout(f"{text[:at]},{text[at:]}\n", layout.num_ranks, layout.num_virtual) == layout
    num_mtp = "".join(layout.stages).count("m")
    assert layout_of(layout.boundaries, layout.num_ranks, num_mtp) == layout


@given(st.text("EtmL|(()),**0123x é", max_size=12) | st.text("t|()*23,", max_size=9).map("E{}|L".format))
@settings(max_examples=some(600))
def test_any_text_is_read_as_megatron_does_or_refused(text: str) -> None:
    try:
        layout = read_layout(text, 1)
    except FormatError:
        return
    assert as_megatron_reads(text.strip()) == [*layout.stages]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Ett|tX", "character 6: 'X' is not E, t, m, L or |, alone or as in t*3, nor a group without groups in it"),
        ("E(t(t)*2)*2|L", "character 2: '(t(t)*2)*2|L' is not"),
        ("E(tt|L", "character 2: '(tt|L'"),
        ("Et*|L", "character 2: 't*|L'"),
        ("E(t,t*)*2|L", "character 5: 't*'"),
        ("", "0 E (embedding); it needs exactly one"),
        ("Et|tLL", "2 L (loss)"),
        ("Et|L|", "L (loss) must be last in the last stage, which is '' there"),
        ("Em|tL", "a t (transformer layer) comes after an m (MTP)"),
        ("Et|m|mL", "m (MTP) is in the stages 1, 2; put all of them into one"),
    ],
)
def test_what_is_no_layout(text: str, told: str) -> None:
    with pytest.raises(FormatError, match=re.escape(told)):
        read_layout(text, 1)


def test_layouts_that_do_not_fit_the_ranks() -> None:
    with pytest.raises(FormatError, match="the layout has 3 stages for 2 ranks"):
        read_layout("Et|t|tL", 2)
    with pytest.raises(FormatError, match="2 stages per rank, not 3; write 2 times 3 stages"):
        read_layout("E|t|t|L", 2, 3)
    with pytest.raises(FormatError, match=r"m \(MTP\) is in stage 1, not the last one of its rank; .* from 2 on"):
        read_layout("Et|tm||L", 2)
    with pytest.raises(FormatError, match="for 0 ranks"):
        read_layout("EtL", 0)


@pytest.mark.parametrize("text", ["Et*1000000000|L", f"Et*{'9' * 5000}|L", "E(t*9999|)*9999|L", f"E{'(' * 50000}"])
def test_a_short_text_fills_no_memory(text: str) -> None:
    with pytest.raises(FormatError, match=r"at most|is not E, t, m, L"):
        read_layout(text, 1)


def test_a_layout_as_a_plan_and_back() -> None:
    layout = read_layout("Et|tt|tt|tL", 2)
    layers = Costs(forward_us=(1, 10, 11, 12, 13, 14, 15, 3), backward_us=(2, 20, 21, 22, 23, 24, 25, 6))
    plan = plan_of(layout, layers, 4)
    assert [plan.placement.ranks_of(stage) for stage in range(4)] == [(0,), (1,), (0,), (1,)]
    times = [task.duration_us for task in plan.placement.tasks]
    assert times == [11, 23, 27, 18, 22, 43, 47, 31]
    assert layout_for(plan, layout.boundaries) == layout
    assert runs_in_this_order(plan)
    assert plan_of(layout, Costs.uniform(4), 4).orders == plan.orders


def test_orders_that_are_not_megatrons_are_told_apart() -> None:
    placement = interleaved(Costs.uniform(4), Cluster.uniform(2))
    assert runs_in_this_order(NAMED["interleaved_1f1b"](placement, 4))
    assert not runs_in_this_order(NAMED["looped_bfs"](placement, 4))
    assert not runs_in_this_order(
        NAMED["zb_v"](NAMED["zb_v"].place(Costs.uniform(4, weight_us=1), Cluster.uniform(2)), 4)
    )


def test_plans_and_costs_that_no_layout_fits() -> None:
    plan = NAMED["gpipe"](place(Costs.uniform(4), Cluster.uniform(2), [0, 0, 1, 1]), 2)
    with pytest.raises(ScheduleError, match=r"stage 1 is on rank 0, but belongs on rank 1; place it by rota\."):
        layout_for(plan, [0, 2, 4, 6, 8])
    with pytest.raises(SplitError, match="make 2 parts for 4 stages; give 5 entries"):
        layout_for(plan, [0, 2, 4])
    empty = read_layout("E||t|L", 4)
    with pytest.raises(PlacementError, match="stage 1 has no layer"):
        plan_of(empty, Costs.uniform(3), 4)
    with pytest.raises(PlacementError, match="7 entries, but the cut has 3 layers in 4 stages"):
        plan_of(empty, Costs.uniform(7), 4)
    assert plan_of(empty, Costs.uniform(4), 4).num_stages == 4
