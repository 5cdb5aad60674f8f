"""Links, filters, causes, and two timelines aligned."""

import re

import pytest

import rota
from drawing.browser.timelines import measured, one_f_one_b, v_shaped
from rota.drawing.packing import CAUSES

STATE = """() => {
    const { view } = window.rota;
    const { section, op } = view.picked;
    const picked = `${section} ${op.stage}${op.kind}${op.batch}`;
    const [t0, t1] = [view.t0.toFixed(1), view.t1.toFixed(1)];
    return { ...view, t0, t1, hidden: [...view.hidden].sort(), picked, pointed: null };
}"""


def test_a_link_shows_what_its_sender_saw(open_page):
    timeline = v_shaped()
    it = open_page(timeline)
    page = it.page
    page.mouse.click(*it.place(2, timeline.starts_us[2][4] + 20))
    for selector in ("#zoom-in", "[data-kind=W]", "#show-critical", "#show-memory", "[data-cause='6']"):
        if page.locator(selector).count():
            page.click(selector)
    page.select_option("#stage-filter", "3")
    page.fill("#follow", "2")
    page.wait_for_function("() => location.hash.includes('batch=2') && location.hash.includes('stage=3')")
    state = it.ask(STATE)
    assert state["hidden"] == ["W"]
    assert state["picked"] == f"0 {timeline.plan.orders[2][4]}"
    other = open_page(timeline, "#" + page.url.partition("#")[2])
    assert other.ask(STATE) == state
    other.ask("(hash) => { location.hash = hash; }", "batch=1&t=10-500")
    other.page.wait_for_function("() => window.rota.view.batch === 1")
    assert other.view() == [10, 500]
    assert other.ask("() => window.rota.view.picked") is None


@pytest.mark.parametrize("fragment", ["#batch=999&stage=x&cause=77", "#op=zz.9&hide=Q", "#%%%"])
def test_links_without_sense_show_everything(open_page, fragment):
    timeline = one_f_one_b()
    it = open_page(timeline, fragment)
    assert it.view() == [0, timeline.makespan_us]
    assert it.ask("() => [window.rota.view.batch, window.rota.view.cause, window.rota.view.picked]") == [
        None,
        None,
        None,
    ]


def test_filters_pale_what_they_leave_out_and_make_nothing_idle(open_page):
    it = open_page(one_f_one_b())
    before = it.drawn(1)
    it.page.click("[data-kind=F]")
    it.settle()
    after = it.drawn(1)
    assert before[3::4] == after[3::4]
    blue = [0, 114, 178, 255]
    pixels = [before[i : i + 4] for i in range(0, len(before), 4)]
    pale = [after[i : i + 4] for i in range(0, len(after), 4)]
    assert pixels.count(blue) > 100
    assert blue not in pale
    assert {tuple(now) for was, now in zip(pixels, pale, strict=True) if was == [230, 159, 0, 255]} == {
        (230, 159, 0, 255)
    }
    it.page.click("[data-kind=F]")
    it.settle()
    assert it.drawn(1) == before


def test_two_timelines_are_aligned_and_told_against_each_other(open_page):
    planned = one_f_one_b()
    seen = measured(planned)
    it = open_page(seen, above=planned)
    full = max(seen.makespan_us, planned.makespan_us)
    assert it.view() == [0, full]
    assert it.place(1, 500, 0)[0] == it.place(1, 500, 1)[0]
    assert it.place(0, 0, 1)[1] > it.place(3, 0, 0)[1]
    before, after = (next(s for s in t.op_spans() if str(s.work) == "1B2") for t in (planned, seen))
    lines = it.point(1, (after.start_us + after.end_us) / 2, section=1)
    assert lines[0].startswith("1B2  ")
    assert lines[-2].startswith("planned: 0.200 ms from ")
    (later_ms,) = re.findall(r"here ([+−][\d.]+) ms in start", lines[-1])
    assert round(1000 * float(later_ms.replace("−", "-"))) == after.start_us - before.start_us
    headings = it.ask("() => window.rota.sections.map(({ title }) => title)")
    assert headings == ["planned", "measured"]
    causes = it.ask("() => window.rota.sections.map(({ totals }) => Array.from(totals.all))")
    for found, told in zip(causes, (rota.idle(planned), rota.idle(seen, planned)), strict=True):
        assert found == [sum(p.duration_us for p in told if p.cause is cause) for cause in CAUSES]
