"""Chrome traces have the fields that Perfetto reads, and say what the timeline says."""

import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from drawing.browser.timelines import wired
from rota import Cluster, Costs, Plan, RotaError, Timeline, idle, place, schedules, simulate
from rota.drawing import save, to_chrome_trace
from support.core_strategies import plans, wired_plans
from support.measured import measured_like
from support.sampling import some

COSTS = Costs((30, 50), (70, 90), activation_bytes=4, boundary_bytes=6, reduce_us=20, optimizer_us=10)
TIMELINE = simulate(schedules.one_f_one_b(place(COSTS, Cluster.uniform(2, 20, latency_us=10, bytes_per_us=1)), 3))

#: Of each phase the fields beside ph, name and pid, as the Trace Event Format asks for them.
FIELDS = {
    "M": {"args"},
    "X": {"cat", "tid", "ts", "dur", "args"},
    "s": {"cat", "id", "tid", "ts"},
    "t": {"cat", "id", "tid", "ts"},
    "f": {"cat", "id", "tid", "ts", "bp"},
    "C": {"ts", "args"},
}


def events_of(timeline: Timeline) -> list[dict[str, Any]]:
    document = json.loads(to_chrome_trace(timeline))
    assert document.keys() == {"displayTimeUnit", "traceEvents"}
    events: list[dict[str, Any]] = document["traceEvents"]
    for event in events:
        required = FIELDS[event["ph"]] | {"ph", "name", "pid"}
        assert event.keys() - {"tid"} == required - {"tid"}
        assert isinstance(event["pid"], int)
        assert all(isinstance(event[name], (int, float)) for name in ("ts", "dur") if name in event)
        assert event.get("dur", 0) >= 0
    return events


def tracks(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[int, int, str]]]:
    found: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
    for event in events:
        if event["ph"] == "X":
            times = event["ts"], event["ts"] + event["dur"], event["name"]
            found.setdefault((event["pid"], event["tid"]), []).append(times)
    return found


@given(plans() | wired_plans())
@settings(max_examples=some(60))
def test_slices_are_what_happened_and_none_of_a_track_overlap(plan: Plan) -> None:
    for timeline in (simulate(plan), measured_like(plan, random.Random(plan.num_ops))):
        events = events_of(timeline)
        slices = Counter((pid - 1, *one) for (pid, _), of_track in tracks(events).items() for one in of_track)
        spans = [span for span in timeline.spans() if span.duration_us or span.work in set().union(*plan.orders)]
        expected = Counter((span.rank, span.start_us, span.end_us, str(span.work)) for span in spans)
        expected += Counter((one.rank, one.start_us, one.end_us, str(one.cause)) for one in idle(timeline))
        for i in range(len(plan.placement.cluster.shared)):
            served = timeline.service_spans(i)
            expected += Counter((plan.num_ranks, one.start_us, one.end_us, str(one.work)) for one in served)
        for r, route in enumerate(plan.placement.routes):
            for waits in zip(timeline.handed_over_us(r), timeline.sent_us[r], strict=True):
                expected[route.sender, *waits, "wait"] += bool(route.shared) and waits[0] < waits[1]
        assert slices == +expected
        on_ranks = {track: them for track, them in tracks(events).items() if track[0] <= plan.num_ranks}
        for of_track in on_ranks.values():
            assert all(before[1] <= after[0] for before, after in pairwise(sorted(of_track)))


def test_arrows_go_from_makers_through_transfers_to_readers() -> None:
    events = events_of(TIMELINE)
    all_tracks = tracks(events)
    flows: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] in "stf":
            flows.setdefault(event["id"], []).append(event)
    assert len(flows) == 6
    for flow in flows.values():
        assert [event["ph"] for event in flow] == ["s", "t", "f"]
        names = []
        for event in flow:
            inside = [name for start, end, name in all_tracks[event["pid"], event["tid"]] if start <= event["ts"] < end]
            names += inside
        assert names[1] == f"{names[0]}→{names[2]}"
        assert [event["ts"] for event in flow] == sorted(event["ts"] for event in flow)


def names_of(timeline: Timeline) -> dict[tuple[int, int | None], str]:
    """Of processes and their tracks."""
    return {
        (event["pid"], event.get("tid")): event["args"]["name"]
        for event in events_of(timeline)
        if event["ph"] == "M" and "name" in event["args"]
    }


def test_ranks_and_tracks_have_names_in_order() -> None:
    named = names_of(TIMELINE)
    assert [named[pid, None] for pid in (1, 2)] == ["rank 0", "rank 1"]
    for process in (1, 2):
        mine = [name for (pid, tid), name in sorted(named.items(), key=str) if pid == process and tid is not None]
        assert mine == ["compute", "idle", "step end", "transfers"]
    assert set(tracks(events_of(TIMELINE))) <= set(named)
    assert {"shared links", "host a"} <= {*names_of(wired()).values()}


def test_save_writes_it_and_takes_no_second_timeline(tmp_path: Path) -> None:
    save(TIMELINE, tmp_path / "trace.json")
    assert (tmp_path / "trace.json").read_text() == to_chrome_trace(TIMELINE) == to_chrome_trace(TIMELINE.plan)
    with pytest.raises(RotaError, match=r"trace.json' is a Chrome trace, which shows one timeline"):
        save(TIMELINE, tmp_path / "trace.json", above=TIMELINE)


def test_no_two_tracks_share_a_number() -> None:
    """Perfetto names threads by their number alone, whatever process they are of, and has plans for number 0."""
    keys = {(event["pid"], event["tid"]) for event in events_of(TIMELINE) if "tid" in event}
    numbers = [tid for _, tid in keys] + list({pid for pid, _ in keys})
    assert len(numbers) == len(set(numbers))
    assert min(numbers) > 0
