"""What notebooks show: well-formed HTML without scripts, whose bars are what happened."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings

from rota import schedules
from rota.accounting import explain
from rota.accounting.comparison import compare
from rota.core import notebook
from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.placing import interleaved, place
from rota.core.plan import Plan
from rota.core.simulation import simulate
from rota.core.timeline import Timeline
from rota.search.result import SearchResult
from support.core_strategies import plans
from support.sampling import some

PLAN = schedules.one_f_one_b(
    place(Costs.uniform(4, 100, 200, reduce_us=30, optimizer_us=(0, 0, 0, 10)), Cluster.uniform(4, latency_us=5)), 6
)


def parsed(page: str) -> ElementTree.Element:
    """As XML, which is stricter than HTML."""
    root = ElementTree.fromstring(page)
    assert not {"script", "link", "img", "iframe"} & {element.tag for element in root.iter()}
    assert "http" not in page
    return root


def bars(root: ElementTree.Element) -> list[tuple[int, int]]:
    """(start, end) of every bar, from where it is drawn."""
    (svg,) = root.iter("svg")
    drawn = [
        (float(r.get("x", 0)) - 60, float(r.get("width", 0))) for r in svg.iter("rect") if r.find("title") is not None
    ]
    titles = [title.text or "" for title in svg.iter("title")]
    assert len(drawn) == len(titles)
    times = []
    for (left, width), title in zip(drawn, titles, strict=True):
        start, end = (int(word.replace(",", "")) for word in title.split(": ")[1].removesuffix(" µs").split(" to "))
        until = simulate(PLAN).makespan_us
        assert left == pytest.approx(900 * start / until, abs=0.01)
        assert width == pytest.approx(900 * (end - start) / until, abs=0.01)
        times.append((start, end))
    return times


def test_every_op_is_a_bar_where_it_ran() -> None:
    timeline = simulate(PLAN)
    ops = [(span.start_us, span.end_us) for span in timeline.op_spans()]
    assert sorted(bars(parsed(PLAN._repr_html_()))) == sorted(ops)
    ends = [(span.start_us, span.end_us) for span in timeline.step_end_spans()]
    assert sorted(bars(parsed(timeline._repr_html_()))) == sorted(ops + ends)
    assert f"makespan {timeline.makespan_us:,} µs · bubble {timeline.bubble_fraction:.1%}" in timeline._repr_html_()


@given(plans())
@settings(max_examples=some(50))
def test_any_plan_can_be_shown(plan: Plan) -> None:
    parsed(plan._repr_html_())
    parsed(simulate(plan)._repr_html_())


def test_a_plan_that_cannot_run_says_why() -> None:
    shown = "".join(parsed(replace(PLAN, orders=PLAN.orders[::-1])._repr_html_()).itertext())
    assert "cannot run" in shown
    assert "rank 0 does 3F0, but stage 3 is on rank 3" in shown


def test_later_stages_of_a_rank_are_paler() -> None:
    plan = schedules.interleaved_one_f_one_b(interleaved(Costs.uniform(4), Cluster.uniform(2)), 4)
    opacities = {rect.get("opacity") for rect in parsed(plan._repr_html_()).iter("rect")}
    assert opacities == {None, "0.50", "0.08"}  # of the idle band


def test_too_many_ops_are_left_to_other_pictures() -> None:
    plan = schedules.gpipe(place(Costs.uniform(2, 100, 200), Cluster.uniform(2)), notebook.MOST_BARS)
    shown = "".join(parsed(plan._repr_html_()).itertext())
    assert "12,000 ops are too many for a notebook: draw them by rota.drawing.save(" in shown


def test_comparisons_and_explanations_show_their_tables() -> None:
    measured = simulate(PLAN)
    slower = replace(measured, ends_us=tuple((*ends[:-1], ends[-1] + 50) for ends in measured.ends_us))
    assert isinstance(slower, Timeline)
    comparison = compare(PLAN, slower)
    shown = "".join(parsed(comparison._repr_html_()).itertext())
    assert comparison.to_text() in shown
    assert shown.index("Planned") < shown.index("Measured")
    assert "idle: " in shown
    assert "drain" in shown
    explanation = explain(PLAN)
    assert "idle: ■ drain" in "".join(parsed(explanation._repr_html_()).itertext())
    assert explanation.to_text() in "".join(parsed(explanation._repr_html_()).itertext())


def test_search_results_show_the_plan_and_the_proof() -> None:
    result = SearchResult(PLAN, "makespan", Fraction(9), Fraction(8), "of a <bound>", "hand", None, (), elapsed_s=1.0)
    shown = "".join(parsed(result._repr_html_()).itertext())
    assert result.to_text() in shown
    assert "Found plan" in shown
    assert "idle: ■ drain" in shown


def test_what_is_written_into_a_page_is_escaped() -> None:
    page = notebook.document(notebook.heading("<b>", ["</script>"]), notebook.preformatted("a < b & c"))
    assert "".join(parsed(page).itertext()) == "<b> · </script>a < b & c"
