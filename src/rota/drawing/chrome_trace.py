"""A timeline as a Chrome trace, which opens in Perfetto (ui.perfetto.dev) and in chrome://tracing.

    process  rank 0      track compute     0F0  0F1  …             counter memory, and its limit
                         track idle        waiting  order …
                         track transfers   0F0→1F0 …
                         track waiting     wait …                 for shared links
    process  links       track host a      0F0→1F0 …          while they occupy the shared link
    flow arrows          0F0 ─▶ 0F0→1F0 ─▶ 1F0

Times are in µs, as the format requires.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from rota.accounting import idle
from rota.core.plan import Plan
from rota.core.simulation import timeline_of
from rota.core.tasks import Op, Transfer
from rota.core.timeline import Span, Timeline

Event = dict[str, Any]

#: Tracks of a rank; the last three may have several lanes.
_COMPUTE, _IDLE, _STEP_END, _TRANSFERS, _WAITING = 0, 1, 1_000, 2_000, 3_000
_TRACK_NAMES = {_COMPUTE: "compute", _IDLE: "idle", _STEP_END: "step end", _TRANSFERS: "transfers", _WAITING: "waiting"}
_MAX_TRACKS = 10_000  # more than any rank has
_INSIDE_US = 0.001  # an arrow starts this long before its op ends: at the end itself, the op's slice is closed


def to_chrome_trace(timeline: Timeline | Plan) -> str:
    """Return the trace as JSON, with one event per line.

    Spans that overlap on a track are put into separate lanes.

    Args:
        timeline: What to export. A plan is simulated first.

    Returns:
        The text of a `.json` trace. It starts with ``{"displayTimeUnit": "ms", "traceEvents": [``.
    """
    events = ",\n".join(json.dumps(event, ensure_ascii=False) for event in _events(timeline_of(timeline)))
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{events}\n]}}\n'


def _events(timeline: Timeline) -> Iterator[Event]:
    transfers = list(_in_lanes(timeline.transfer_spans(), _TRANSFERS))
    waits = list(_in_lanes(_waits(timeline), _WAITING))
    step_ends = list(_in_lanes(timeline.step_end_spans(), _STEP_END))
    tracks: list[set[int]] = [{_COMPUTE, _IDLE} for _ in range(timeline.num_ranks)]
    for span, track in [*transfers, *waits, *step_ends]:
        tracks[span.rank].add(track)
    for rank, rank_tracks in enumerate(tracks):
        yield from _names(rank, sorted(rank_tracks))
    for span in timeline.op_spans():
        assert isinstance(span.work, Op)
        stage, kind, microbatch = span.work
        yield _slice(span, str(span.work), _COMPUTE, stage=stage, kind=str(kind), microbatch=microbatch)
    for interval in idle(timeline):
        ready = {"ready": str(interval.ready)} if interval.ready else {}
        yield _slice(interval, str(interval.cause), _IDLE, waits_for=str(interval.waits_for), **ready)
    for span, track in step_ends:
        yield _slice(span, str(span.work), track)
    for span, track in transfers:
        assert isinstance(span.work, Transfer)
        if span.duration_us:
            yield _slice(span, str(span.work), track, num_bytes=span.work.num_bytes, to_rank=span.work.receiver)
    for span, track in waits:
        yield _slice(span, "wait", track, waits_for=_links_of(timeline, span.work), transfer=str(span.work))
    yield from _shared_links(timeline)
    yield from _arrows(timeline, transfers)
    yield from _counters(timeline)


def _waits(timeline: Timeline) -> Iterator[Span]:
    handed_over = (time for r in range(len(timeline.sent_us)) for time in timeline.handed_over_us(r))
    for span, start_us in zip(timeline.transfer_spans(), handed_over, strict=True):
        assert isinstance(span.work, Transfer)
        if start_us < span.start_us and _links_of(timeline, span.work):
            yield span._replace(start_us=start_us, end_us=span.start_us)


def _links_of(timeline: Timeline, transfer: object) -> str:
    """Return the names of the shared links that serve a transfer; "" if none does."""
    assert isinstance(transfer, Transfer)
    placement = timeline.plan.placement
    ends = placement.index[transfer.source[:2]], placement.index[transfer.target[:2]], *transfer[2:4]
    served = next(route.shared for route in placement.routes if route[:4] == ends)
    return ", ".join(placement.cluster.shared[i].name for i in served)


def _shared_links(timeline: Timeline) -> Iterator[Event]:
    """Yield a process with a track for each shared link, and on it what the link serves."""
    shared = timeline.plan.placement.cluster.shared
    if shared:
        process = timeline.num_ranks
        yield from _labels("process", "shared links", process, _location(process))
    for i, link in enumerate(shared):
        yield from _labels("thread", link.name, i, _location(timeline.num_ranks, i))
        for span in timeline.service_spans(i):
            assert isinstance(span.work, Transfer)
            on_link = span._replace(rank=timeline.num_ranks)
            yield _slice(on_link, str(span.work), i, num_bytes=span.work.num_bytes, from_rank=span.work.sender)


def _slice(span: Any, name: str, track: int, **arguments: object) -> Event:
    times = {"ts": span.start_us, "dur": span.duration_us}
    return {"ph": "X", "name": name, "cat": "rota", **_location(span.rank, track), **times, "args": arguments}


def _location(rank: int, track: int | None = None) -> Event:
    """Return the `pid` and `tid` of a rank's track.

    Perfetto identifies a thread by its number alone, and treats process 0 as the system.
    """
    process = rank + 1
    return {"pid": process} if track is None else {"pid": process, "tid": process * _MAX_TRACKS + track}


def _names(rank: int, tracks: Iterable[int]) -> Iterator[Event]:
    """Yield the metadata that names and sorts a rank and its tracks."""
    yield from _labels("process", f"rank {rank}", rank, _location(rank))
    for track in tracks:
        first = max(base for base in _TRACK_NAMES if base <= track)
        name = _TRACK_NAMES[first] + f" {track - first + 1}" * (track > first)
        yield from _labels("thread", name, track, _location(rank, track))


def _labels(kind: str, name: str, index: int, location: Event) -> Iterator[Event]:
    """Yield the metadata that names a process or thread, and sorts it among the others."""
    yield {"ph": "M", "name": f"{kind}_name", **location, "args": {"name": name}}
    yield {"ph": "M", "name": f"{kind}_sort_index", **location, "args": {"sort_index": index}}


def _in_lanes(spans: Iterable[Span], first: int) -> Iterator[tuple[Span, int]]:
    """Yield each span with its track: on its rank, the first free one from `first` on."""
    free_us: dict[int, list[int]] = {}  # rank -> when each of its lanes becomes free
    for span in sorted(spans, key=lambda span: span.start_us):
        lanes = free_us.setdefault(span.rank, [])
        lane = next((i for i, free in enumerate(lanes) if free <= span.start_us), len(lanes))
        lanes[lane : lane + 1] = [span.end_us]
        yield span, first + lane


def _arrows(timeline: Timeline, transfers: Iterable[tuple[Span, int]]) -> Iterator[Event]:
    """Yield arrows from producer to consumer, through the transfer if it has a duration.

    An op without a duration gets no arrows. Arrows come after all slices, because each one binds to the slice that
    is open at its time.
    """
    ops = {(span.rank, span.work): span for span in timeline.op_spans() if span.duration_us}
    for number, (span, track) in enumerate(transfers):
        assert isinstance(span.work, Transfer)
        source, target, sender, receiver, _ = span.work
        producer, consumer = ops.get((sender, source)), ops.get((receiver, target))
        if producer is None or consumer is None:
            continue
        flow = {"name": "data", "cat": "rota", "id": number}
        yield {"ph": "s", **flow, **_location(sender, _COMPUTE), "ts": producer.end_us - _INSIDE_US}
        if span.duration_us:
            yield {"ph": "t", **flow, **_location(sender, track), "ts": span.start_us}
        yield {"ph": "f", "bp": "e", **flow, **_location(receiver, _COMPUTE), "ts": consumer.start_us}


def _counters(timeline: Timeline) -> Iterator[Event]:
    for rank, limit_bytes in enumerate(timeline.plan.placement.cluster.limit_bytes):
        if timeline.peak_memory_bytes[rank]:
            for time_us, num_bytes in timeline.memory(rank):
                yield {"ph": "C", "name": "memory", **_location(rank), "ts": time_us, "args": {"bytes": num_bytes}}
        if limit_bytes is not None:
            for time_us in (0, timeline.makespan_us):
                args = {"bytes": limit_bytes}
                yield {"ph": "C", "name": "memory limit", **_location(rank), "ts": time_us, "args": args}
