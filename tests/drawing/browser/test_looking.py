"""Whoever looks gets around: pointing, zooming, moving, walking."""

import re

import pytest

import rota
from drawing.browser.timelines import measured, one_f_one_b, v_shaped
from rota.drawing.packing import CAUSES


def test_a_page_tells_its_title_numbers_and_colours(open_page):
    page = open_page(one_f_one_b(), title="a plan", bound_us=3000).page
    assert page.title() == page.locator("h1").inner_text() == "a plan"
    assert re.fullmatch(r"makespan .* · bubble .*% · within .*% of the optimum.* 4 GB", page.inner_text("#summary"))
    assert page.locator("#kinds").inner_text().split("\n") == ["F forward", "B backward", "reduce", "optimizer"]


def test_pointing_at_an_op_tells_it(open_page):
    timeline = one_f_one_b()
    it = open_page(timeline)
    span = next(span for span in timeline.op_spans() if str(span.work) == "2B3")
    lines = it.point(2, (span.start_us + span.end_us) // 2)
    assert lines[0] == "2B3  backward of stage 2, micro-batch 3"
    assert lines[1] == "rank 2 · 0.200 ms"
    assert lines[2] == f"from {span.start_us / 1000:.3f} ms to {span.end_us / 1000:.3f} ms"
    held = [level for time, level in timeline.memory(2) if time <= span.start_us][-1]
    assert lines[3] == f"memory: up to {rota.core.text.size_text(held)} of 8 GB"


def test_pointing_at_a_gap_tells_its_cause_and_what_it_waits_for(open_page):
    timeline = one_f_one_b()
    it = open_page(timeline)
    asked = 0
    for piece in rota.idle(timeline):
        if piece.end_us - piece.start_us < 30:
            continue
        lines = it.point(piece.rank, (piece.start_us + piece.end_us) / 2)
        assert lines[0] == f"idle  {piece.cause}"
        if isinstance(piece.waits_for, rota.Op):
            assert any(line.startswith(f"waits for {piece.waits_for} of rank ") for line in lines)
        asked += 1
    assert asked > 8
    it.page.mouse.move(5, 5)
    it.settle()
    assert not it.page.locator("#tip").is_visible()


def test_the_wheel_zooms_at_the_pointer(open_page):
    timeline = one_f_one_b()
    it = open_page(timeline)
    it.page.mouse.move(*map(round, it.place(1, timeline.makespan_us / 3)))
    before = it.ask("() => window.rota.view.pointed.time")
    it.page.mouse.wheel(0, -600)
    it.page.wait_for_function(
        "(full) => window.rota.view.t1 - window.rota.view.t0 < full / 2", arg=timeline.makespan_us
    )
    assert it.ask("() => window.rota.view.pointed.time") == pytest.approx(before, abs=1e-6 * timeline.makespan_us)
    it.page.mouse.wheel(0, 100_000)
    it.page.wait_for_function("(full) => window.rota.view.t1 - window.rota.view.t0 === full", arg=timeline.makespan_us)


def test_keys_walk_from_op_to_op_and_follow_a_micro_batch(open_page):
    timeline = one_f_one_b()
    it = open_page(timeline)
    it.page.mouse.click(*it.place(1, timeline.starts_us[1][3] + 20))
    walked = [it.ask("() => window.rota.view.picked.op.i")]
    for key in "jjk":
        it.page.keyboard.press(key)
        walked.append(it.ask("() => window.rota.view.picked.op.i"))
    assert walked == [3, 4, 5, 4]
    it.page.keyboard.press("n")
    assert it.ask("() => window.rota.view.picked.op.lane.rank") == 2
    it.page.keyboard.press("f")
    op = timeline.plan.orders[2][it.ask("() => window.rota.view.picked.op.i")]
    assert it.ask("() => window.rota.view.batch") == op.microbatch
    assert it.page.input_value("#follow") == str(op.microbatch)
    assert it.page.text_content("#said").startswith(f"{op}  ")
    it.page.keyboard.press("]")
    assert it.ask("() => window.rota.view.batch") == op.microbatch + 1
    it.page.keyboard.press("Escape")
    assert it.ask("() => [window.rota.view.batch, window.rota.view.picked]") == [None, None]


# --- links, filters, causes, and two timelines aligned ----------------------------------------------------------------


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


# --- hostile names, the policy, and what eyes and windows there are ---------------------------------------------------


@pytest.mark.parametrize(
    "name", ["</script><script>window.hacked = 1</script>", "<img src=x onerror='window.hacked = 1'>", "{data}{script}"]
)
def test_hostile_names_are_but_text(open_page, name):
    timeline = one_f_one_b()
    page = open_page(timeline, title=name, above=timeline, names=(name, name)).page
    assert page.locator("h1").inner_text() == name
    assert page.title() == name
    assert page.evaluate("() => window.hacked") is None
    assert page.locator("img, b:not(.cause b)").count() == 0
    assert page.evaluate("() => window.rota.sections[1].title") == name


def test_the_policy_lets_nothing_in(open_page):
    it = open_page(one_f_one_b())
    blocked = it.ask(
        """async () => {
            const blocked = [];
            addEventListener("securitypolicyviolation", (event) => blocked.push(event.effectiveDirective));
            const image = document.createElement("img");
            image.src = "http://127.0.0.1:9/x.png";
            const script = document.createElement("script");
            script.textContent = "window.hacked = 1";
            document.body.append(image, script);
            await fetch("http://127.0.0.1:9/").catch(() => {});
            await new Promise((done) => setTimeout(done, 0));
            return blocked.sort();
        }"""
    )
    assert blocked == ["connect-src", "img-src", "script-src-elem"]
    assert it.ask("() => window.hacked") is None
    assert all("Content Security Policy" in text or "Fetch API" in text for text in it.complaints)
    it.complaints.clear()
    assert it.requests.pop() == "http://127.0.0.1:9/x.png"  # asked for, and refused


def test_dark_and_light(open_page):
    timeline = one_f_one_b()
    ground = "() => getComputedStyle(document.body).backgroundColor"
    light, dark = open_page(timeline), open_page(timeline, dark=True)
    colors = light.ask(ground), dark.ask(ground)
    assert colors[0] != colors[1]
    light.page.keyboard.press("d")
    assert light.ask(ground) == colors[1]
    assert light.drawn(1)[3::4] == dark.drawn(1)[3::4]
