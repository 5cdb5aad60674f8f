"""The page knows exactly what the timeline says."""

import random
from bisect import bisect_right
from itertools import accumulate

import pytest

import rota
from drawing.browser.timelines import bidirectional, huge, measured, one_f_one_b, v_shaped, wired
from drawing.test_text import SHAPES
from rota.drawing.packing import CAUSES
from support.sampling import IS_WHOLE

TIMELINES = {
    **SHAPES,
    "transfers, memory, step end": one_f_one_b,
    "measured": lambda: measured(one_f_one_b()),
    "V, measured": lambda: measured(v_shaped()),
    "two streams": bidirectional,
    "two streams, measured": lambda: measured(bidirectional()),
    "huge": huge,
    "wired": wired,
    "wired, measured": lambda: measured(wired()),
}


@pytest.fixture(params=TIMELINES)
def timeline(request):
    return TIMELINES[request.param]()


def test_the_page_knows_all_that_the_timeline_says_and_the_critical_path(timeline, open_page):
    it = open_page(timeline, "#critical=1")
    found = it.ask(
        """() => {
            const { timeline } = window.rota.sections[0];
            const { transfers, tasks, routes, stepEnds } = timeline;
            const lanes = timeline.lanes.map((lane) => ({
                ops: Array.from(lane.start, (start, i) => {
                    const [stage, kind] = tasks[timeline.slots[lane.slot[i]][0]];
                    return [`${stage}${kind}${lane.batch[i]}`, start, lane.end[i]];
                }),
                idle: Array.from(lane.idle.start, (start, i) => [start, lane.idle.end[i], lane.idle.cause[i]]),
                levels: Array.from(lane.levels.time, (time, i) => [time, lane.levels.bytes[i]]),
            }));
            const sent = Array.from(transfers.sent, (time, k) => {
                const [, , sender, receiver] = routes[transfers.route[k]];
                return [sender, receiver, time, transfers.arrived[k]];
            });
            return { lanes, sent, peaks: timeline.peaks, stepEnds, makespan: timeline.makespan };
        }"""
    )
    for rank, lane in enumerate(found["lanes"]):
        assert lane["ops"] == [[str(s.work), s.start_us, s.end_us] for s in timeline.op_spans() if s.rank == rank]
        assert lane["levels"] == [list(level) for level in timeline.memory(rank)]
        pieces = [piece for piece in rota.idle(timeline) if piece.rank == rank]
        assert lane["idle"] == [[p.start_us, p.end_us, CAUSES.index(p.cause)] for p in pieces]
    assert found["peaks"] == list(timeline.peak_memory_bytes)
    assert found["makespan"] == timeline.makespan_us
    assert found["sent"] == [[s.work.sender, s.work.receiver, s.start_us, s.end_us] for s in timeline.transfer_spans()]
    assert len(found["stepEnds"]) == len(list(timeline.step_end_spans()))
    critical = it.ask(
        """() => {
            const { timeline } = window.rota.sections[0];
            return timeline.criticalOps.map(({ lane, start, end }) => [lane.rank, start, end]);
        }"""
    )
    spans = [span for span in timeline.critical_path() if not isinstance(span.work, rota.Transfer)]
    step_ends = set(timeline.step_end_spans())
    drawn = [span for span in spans if span in step_ends or isinstance(span.work, rota.Op)]
    assert critical == [[span.rank, span.start_us, span.end_us] for span in drawn]


def test_the_page_knows_when_transfers_wait_and_occupy_their_links(open_page):
    timeline = wired()
    found = open_page(timeline).ask(
        """() => {
            const { transfers, links } = window.rota.sections[0].timeline;
            return { links, waits: Array.from(transfers.handedOver), served: Array.from(transfers.served) };
        }"""
    )
    routes = range(len(timeline.plan.placement.routes))
    assert found["links"] == ["host a"]
    assert found["waits"] == [time for r in routes for time in timeline.handed_over_us(r)]
    assert sorted(found["served"]) == [span.end_us for span in timeline.service_spans(0)]


# --- pixel truth: at every zoom what is drawn covers what is busy, so that bubbles neither vanish nor grow ------------


NUM_WINDOWS = 200
ZOOMS = (1, 6, 40, 300, 5000) if IS_WHOLE else (1, 40, 5000)


@pytest.fixture(scope="module")
def crowded():
    """8,192 ops of all lengths, with gaps of all lengths: far more than there are pixels."""
    return measured(one_f_one_b(8, 512), longest_us=200)


def busy_until(timeline, rank):
    """The time in ops from 0 to any time, op by op."""
    starts, ends = timeline.starts_us[rank], timeline.ends_us[rank]
    before = [0, *accumulate(end - start for start, end in zip(starts, ends, strict=True))]

    def until(time):
        i = bisect_right(starts, time)
        return before[i - 1] + min(time, ends[i - 1]) - starts[i - 1] if i else 0

    return until


@pytest.mark.parametrize("scale", [pytest.param(1, marks=pytest.mark.sweep), 2])
def test_any_window_is_covered_as_its_rank_is_busy(crowded, open_page, scale):
    it, chooser = open_page(crowded, scale=scale), random.Random(scale)
    for zoom in ZOOMS:
        width = crowded.makespan_us / zoom
        start = chooser.uniform(0, crowded.makespan_us - width)
        it.ask("(hash) => { location.hash = hash; }", f"t={start:.2f}-{start + width:.2f}")
        it.page.wait_for_function("(t0) => Math.abs(window.rota.view.t0 - t0) < 0.01", arg=start)
        it.settle()
        t0, t1 = it.view()
        assert t1 - t0 == pytest.approx(width, abs=0.02)
        rows = [[0, *accumulate(it.drawn(rank)[3::4])] for rank in range(crowded.num_ranks)]
        until = [busy_until(crowded, rank) for rank in range(crowded.num_ranks)]
        pixels = len(rows[0]) - 1
        assert pixels > 1000 * scale
        off = []
        for _ in range(NUM_WINDOWS):
            rank = chooser.randrange(crowded.num_ranks)
            left, right = sorted(chooser.sample(range(pixels + 1), 2))
            drawn = (rows[rank][right] - rows[rank][left]) / 255
            a, b = (t0 + x * (t1 - t0) / pixels for x in (left, right))
            off.append(abs(drawn - (until[rank](b) - until[rank](a)) * pixels / (t1 - t0)))
        assert max(off) < 1
        if zoom == 1:  # and not because all is alike: gaps are narrower than pixels there
            assert 0.2 < rows[0][-1] / 255 / pixels < 0.95
