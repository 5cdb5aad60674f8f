"""Every idle microsecond of every rank, by its cause.

rank    ███████                                              ███████
        before │ SLOWER │ WAITING           │ LINK │ TRANSFER │LAUNCH│ next
                        ╰ ORDER or MEMORY from when another op is ready
maker     ░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░ waits  →→→→→→→→→→→
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from rota.accounting.causes import Cause, Idle
from rota.accounting.delays import Arrival, Overruns, Place, Readiness, contention_of
from rota.core.plan import Plan
from rota.core.simulation import timeline_of
from rota.core.tasks import Kind, Op, Transfer, scalar
from rota.core.timeline import Span, StepEndWork, Timeline


def idle(
    timeline: Timeline | Plan, planned: Timeline | Plan | None = None, num_cores: int | None = None
) -> tuple[Idle, ...]:
    """Find every idle microsecond of every rank, and its cause.

    Args:
        timeline: What happened. A plan is simulated.
        planned: What should have happened: time that upstream ops ran longer is SLOWER. A plan is simulated. None: the
            timeline's own plan.
        num_cores: Number of cores, if all ranks share one machine; None: as recorded by the run. If known, part of
            the SLOWER and LAUNCH time is CORES.

    Returns:
        The idle intervals sorted by rank and start. On each rank their durations add up to `timeline.idle_us[rank]`.

    Raises:
        PlanError: `planned` lacks an op of `timeline`.
    """
    timeline = timeline_of(timeline)
    expected = timeline_of(timeline.plan if planned is None else planned)
    return _Accounts(timeline, expected, num_cores or timeline.num_cores).idle()


class _Accounts:
    """The idle time of one timeline."""

    def __init__(self, timeline: Timeline, planned: Timeline, num_cores: int | None) -> None:
        self._timeline = timeline
        self._readiness = Readiness(timeline)
        self._cores = contention_of(timeline, num_cores)
        self._overruns = Overruns(self._readiness, planned, self._cores)
        self._step_ends: list[list[Span]] = [[] for _ in range(timeline.num_ranks)]
        for span in timeline.step_end_spans():
            self._step_ends[span.rank].append(span)

    def idle(self) -> tuple[Idle, ...]:
        return tuple(piece for rank in range(self._timeline.num_ranks) for piece in _joined(self._on_rank(rank)))

    def _on_rank(self, rank: int) -> Iterator[Idle]:
        starts, ends = self._timeline.starts_us[rank], self._timeline.ends_us[rank]
        gaps = [i for i, start in enumerate(starts) if start > (ends[i - 1] if i else 0)]
        if gaps:
            later = _later_ops(self._timeline, rank, self._readiness.ready_us(rank), gaps)
            headroom = _MemoryHeadroom(self._timeline, rank)
            for i in gaps:
                yield from self._gap(Place(rank, i), ends[i - 1] if i else 0, later[i], headroom)
        yield from self._tail(rank, ends[-1] if ends else 0)

    # --- before an op ---------------------------------------------------------------------------------------------

    def _gap(self, place: Place, start_us: int, later: Sequence[_LaterOp], headroom: _MemoryHeadroom) -> Iterator[Idle]:
        """Idle time before the op at `place`, from `start_us` on."""
        rank, op, end_us = place.rank, self._readiness.op(place), self._readiness.start_us(place)
        ready_us = start_us
        pieces: list[Idle] = []
        arrival = self._readiness.last_arrival(place)
        if arrival is not None and arrival.arrived_us > start_us:
            pieces = [*self._waits(place, arrival, start_us)]
            made_us, ready_us = pieces[0].end_us, max(pieces[-1].end_us, start_us)
            maker = self._readiness.op(arrival.maker)
            pieces = _overlaid(pieces, _passed_over(rank, later, headroom, (start_us, ready_us), maker))
            pieces = _overlaid(pieces, self._overruns.upstream(rank, arrival.maker, start_us, made_us))
        pieces.append(Idle(rank, pieces[-1].end_us if pieces else start_us, end_us, Cause.LAUNCH, op))
        full = self._cores.full_intervals(ready_us, end_us) if self._cores else ()
        yield from _overlaid(pieces, [Idle(rank, a, b, Cause.CORES, op) for a, b in full])

    def _waits(self, place: Place, arrival: Arrival, start_us: int) -> Iterator[Idle]:
        """What the op at `place` waits for until its last input arrives: the maker, links, the way."""
        rank, end_us = place.rank, self._readiness.start_us(place)
        times = (arrival.made_us, arrival.sent_us, arrival.arrived_us)
        made_us, sent_us, ready_us = (min(max(time, start_us), end_us) for time in times)
        maker = self._readiness.op(arrival.maker)
        yield Idle(rank, start_us, made_us, Cause.WAITING if place.position else Cause.WARM_UP, maker)
        message: Op | Transfer = maker
        if arrival.route >= 0:
            placement = self._timeline.plan.placement
            message = placement.transfer(arrival.route, self._readiness.op(place).microbatch)
            if placement.routes[arrival.route].is_copy:
                yield Idle(rank, made_us, ready_us, Cause.COPY, message)
                return
        yield Idle(rank, made_us, sent_us, Cause.SHARED_LINK, message)
        yield Idle(rank, sent_us, ready_us, Cause.TRANSFER, message)

    # --- after the last op ----------------------------------------------------------------------------------------

    def _tail(self, rank: int, start_us: int) -> list[Idle]:
        """Idle time after the rank's last op: its reductions and optimizer steps, else waiting for the step's end."""
        place, work = self._last
        pieces = [Idle(rank, start_us, self._timeline.makespan_us, Cause.DRAIN, work)]
        if place is not None:
            pieces = _overlaid(pieces, self._overruns.upstream(rank, place, start_us, self._timeline.makespan_us))
        step_ends, free_us = [], start_us
        for span in sorted(self._step_ends[rank], key=lambda span: span.start_us):
            if span.end_us > free_us:
                step_ends.append(Idle(rank, max(span.start_us, free_us), span.end_us, Cause.STEP_END, span.work))
                free_us = span.end_us
        return _overlaid(pieces, step_ends)

    @cached_property
    def _last(self) -> tuple[Place | None, Op | StepEndWork | None]:
        """The last op of the rank that ends the step, and what ends the step."""
        timeline = self._timeline
        last = {rank: Place(rank, len(ends) - 1) for rank, ends in enumerate(timeline.ends_us) if ends}
        works: list[tuple[int, int, Op | StepEndWork]] = [
            (self._readiness.end_us(place), rank, self._readiness.op(place)) for rank, place in last.items()
        ]
        for span in (span for spans in self._step_ends for span in spans):
            assert isinstance(span.work, StepEndWork)
            works.append((span.end_us, span.rank, span.work))
        if not works:
            return None, None
        _, rank, work = max(works, key=lambda entry: entry[0])
        return last.get(rank), work


# --- ops that could have run earlier ----------------------------------------------------------------------------------


class _LaterOp(NamedTuple):
    """An op that the plan has later: when it was ready, how long it runs, and when it started."""

    ready_us: int
    op: Op
    duration_us: int
    start_us: int


def _later_ops(
    timeline: Timeline, rank: int, ready_us: Sequence[int], gaps: Sequence[int]
) -> dict[int, tuple[_LaterOp, ...]]:
    """For each gap, given as the position of the op after it: for each task and class, its later op ready first."""
    order, starts, ends = timeline.plan.orders[rank], timeline.starts_us[rank], timeline.ends_us[rank]
    first: dict[tuple[int, Kind, int], _LaterOp] = {}
    later, positions, plan = {}, set(gaps), timeline.plan
    for i in range(len(order) - 1, -1, -1):
        if i in positions:
            later[i] = tuple(first.values())
        key = order[i].stage, order[i].kind, plan.placement.class_in(order[i].microbatch)
        if key not in first or ready_us[i] <= first[key].ready_us:
            first[key] = _LaterOp(ready_us[i], order[i], ends[i] - starts[i], starts[i])
    return later


def _passed_over(
    rank: int, later: Iterable[_LaterOp], headroom: _MemoryHeadroom, gap_us: tuple[int, int], maker: Op
) -> list[Idle]:
    """ORDER from the time when a later op could have run to its end within the gap; MEMORY if it would not fit.

    `gap_us`: from when the previous op is done until the next one is ready. From when one op fits,
    ops that do not fit no longer matter.
    """
    start_us, ready_us = gap_us
    since: dict[Cause, tuple[int, Op]] = {}
    for op_ready_us, op, duration_us, op_start_us in later:
        from_us = max(start_us, op_ready_us)
        if 0 < duration_us <= ready_us - from_us:
            cause = Cause.ORDER if headroom.fits(op, from_us, op_start_us) else Cause.MEMORY
            since[cause] = min(since.get(cause, (from_us, op)), (from_us, op))
    result, end_us = [], ready_us
    for cause in (Cause.ORDER, Cause.MEMORY):
        if cause in since and since[cause][0] < end_us:
            from_us, op = since[cause]
            result.append(Idle(rank, from_us, end_us, cause, maker, op))
            end_us = from_us
    return result[::-1]


# --- memory -----------------------------------------------------------------------------------------------------------


class _MemoryHeadroom:
    """Memory that one rank has left below its limit, over time."""

    def __init__(self, timeline: Timeline, rank: int) -> None:
        self._placement = timeline.plan.placement
        self._limit = self._placement.cluster.limit_bytes[rank]
        if self._limit is None:
            return
        self._times, self._levels = [0], [self._placement.static_bytes[rank]]
        for key, change in timeline.memory_events(rank):
            self._times.append(key // 4)
            self._levels.append(self._levels[-1] + change)

    def fits(self, op: Op, from_us: int, start_us: int) -> bool:
        """Whether `op`, which started at `start_us`, could have run at `from_us` and held its bytes since."""
        if self._limit is None:
            return True
        placement = self._placement.for_microbatch(op.microbatch)
        task = placement.tasks[placement.index[op.stage, op.kind]]
        kept, first = max(scalar(task.held_bytes), 0), bisect_right(self._times, from_us) - 1
        running = self._levels[first] + kept + scalar(task.peak_bytes)
        until = max(bisect_left(self._times, start_us), first + 1)
        return max(running, max(self._levels[first:until]) + kept) <= self._limit


# --- intervals ----------------------------------------------------------------------------------------------------


def _overlaid(pieces: Iterable[Idle], over: Sequence[Idle]) -> list[Idle]:
    """`pieces`, replaced by those of `over` where they overlap; both are sorted and have no overlaps inside."""
    if not over:
        return [*pieces]
    result, j = [], 0
    for piece in pieces:
        time = piece.start_us
        while j < len(over) and over[j].start_us < piece.end_us:
            start, end = max(over[j].start_us, time), min(over[j].end_us, piece.end_us)
            if start < end:
                result += [piece._replace(start_us=time, end_us=start), over[j]._replace(start_us=start, end_us=end)]
                time = end
            if over[j].end_us > piece.end_us:
                break
            j += 1
        result.append(piece._replace(start_us=time))
    return result


def _joined(pieces: Iterable[Idle]) -> list[Idle]:
    """One rank's pieces without empty ones; adjacent pieces that differ only in time are joined."""
    joined: list[Idle] = []
    for piece in pieces:
        if piece.start_us >= piece.end_us:
            continue
        if joined and piece.start_us == joined[-1].end_us and piece[3:] == joined[-1][3:]:  # from the cause on
            joined[-1] = joined[-1]._replace(end_us=piece.end_us)
        else:
            joined.append(piece)
    return joined
