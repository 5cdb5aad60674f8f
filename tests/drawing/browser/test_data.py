"""The page knows exactly what the timeline says."""

import pytest

import rota
from drawing.browser.timelines import bidirectional, huge, measured, one_f_one_b, v_shaped, wired
from drawing.test_text import SHAPES
from rota.drawing.packing import CAUSES

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
