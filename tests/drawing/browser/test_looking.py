"""Whoever looks gets around: pointing, zooming, moving, walking."""

import re

import pytest

import rota
from drawing.browser.timelines import one_f_one_b


def test_a_page_tells_its_title_numbers_and_colours(open_page):
    page = open_page(one_f_one_b(), title="a plan", bound_us=3000).page
    assert page.title() == page.locator("h1").inner_text() == "a plan"
    assert re.fullmatch(
        r"makespan .* · bubble .*% · within .*% of the optimum · peak 4 GB", page.inner_text("#summary")
    )
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
