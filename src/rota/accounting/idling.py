"""Every idle microsecond of every rank, by its cause.

rank    ███████                                       ███████
        before │ SLOWER │ WAITING   │ TRANSFER │LAUNCH│ next
               │        ╰ ORDER or MEMORY from when another op is ready ╮
maker     ░░░░░░░░░░░░░░░░░░░░░░░░░░→→→→→→→→→→→
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from rota.accounting.causes import Cause, Idle
from rota.accounting.lateness import Crowd, Lateness
from rota.accounting.readiness import Place, Readiness
from rota.accounting.room import Room
from rota.plan import Plan
from rota.simulation import timeline_of
from rota.tasks import Kind, Op
from rota.timeline import Span, StepEndWork, Timeline


def idle(
    timeline: Timeline | Plan, planned: Timeline | Plan | None = None, num_cores: int | None = None
) -> tuple[Idle, ...]:
    """All idle time, sorted by rank and start; on each rank the durations add up to `timeline.idle_us[rank]`.

    A plan is simulated. With `planned`, what ops upstream take longer than there is SLOWER; with `num_cores`, of the
    one machine that all ranks share, part of that is CORES. Raises PlanError where `planned` has other ops.
    """
    timeline = timeline_of(timeline)
    return _Accounts(timeline, None if planned is None else timeline_of(planned), num_cores).idle()


class _Accounts:
    def __init__(self, timeline: Timeline, planned: Timeline | None, num_cores: int | None) -> None:
        self._timeline = timeline
        self._readiness = Readiness(timeline)
        times = ((span.start_us, span.end_us) for span in timeline.op_spans())
        self._crowd = Crowd(times, num_cores) if num_cores else None
        self._lateness = Lateness(self._readiness, planned, self._crowd) if planned else None
        self._step_ends: list[list[Span]] = [[] for _ in range(timeline.num_ranks)]
        for span in timeline.step_end_spans():
            self._step_ends[span.rank].append(span)

    def idle(self) -> tuple[Idle, ...]:
        result: list[Idle] = []
        for rank in range(self._timeline.num_ranks):
            result += _joined(self._of_rank(rank))
        return tuple(result)

    def _of_rank(self, rank: int) -> Iterator[Idle]:
        starts, ends = self._timeline.starts_us[rank], self._timeline.ends_us[rank]
        gaps = [i for i, start in enumerate(starts) if start > (ends[i - 1] if i else 0)]
        if gaps:
            later, room = (
                _later_ops(self._timeline, rank, self._readiness.ready_us(rank), gaps),
                Room(self._timeline, rank),
            )
            for i in gaps:
                yield from self._gap(Place(rank, i), ends[i - 1] if i else 0, later[i], room)
        yield from self._tail(rank, ends[-1] if ends else 0)

    # --- before an op ---------------------------------------------------------------------------------------------

    def _gap(self, place: Place, start_us: int, later: Sequence[_Later], room: Room) -> Iterator[Idle]:
        rank, op, end_us = place.rank, self._readiness.op(place), self._readiness.start_us(place)
        arrival, ready_us = self._readiness.last_arrival(place), start_us
        if arrival is not None and arrival.arrived_us > start_us:
            made_us, ready_us = (min(max(time, start_us), end_us) for time in (arrival.made_us, arrival.arrived_us))
            maker = self._readiness.op(arrival.maker)
            pieces = [Idle(rank, start_us, made_us, Cause.WAITING if place.position else Cause.WARM_UP, maker)]
            if made_us < ready_us:
                pieces.append(Idle(rank, made_us, ready_us, Cause.TRANSFER, self._readiness.transfer(arrival, op)))
            pieces = _overlaid(pieces, _passed_over(rank, later, room, (start_us, ready_us), maker))
            yield from _overlaid(pieces, self._late(rank, arrival.maker, start_us, made_us))
        launch = [Idle(rank, ready_us, end_us, Cause.LAUNCH, op)]
        full = self._crowd.full(ready_us, end_us) if self._crowd else ()
        yield from _overlaid(launch, [Idle(rank, a, b, Cause.CORES, op) for a, b in full])

    def _late(self, rank: int, last: Place, start_us: int, end_us: int) -> list[Idle]:
        """Where, along what waited for what, an op ran longer than planned."""
        if self._lateness is None:
            return []
        late = [piece for piece in self._lateness.upstream(last, start_us) if piece.start_us < end_us]
        return [Idle(rank, a, min(b, end_us), cause, op) for a, b, cause, op in reversed(late)]

    # --- after the last op ----------------------------------------------------------------------------------------

    def _tail(self, rank: int, start_us: int) -> list[Idle]:
        """Its own reductions and optimizer steps; else it waits for what ends the step."""
        place, work = self._last
        pieces = [Idle(rank, start_us, self._timeline.makespan_us, Cause.DRAIN, work)]
        if place is not None:
            pieces = _overlaid(pieces, self._late(rank, place, start_us, self._timeline.makespan_us))
        own, free_us = [], start_us
        for span in sorted(self._step_ends[rank], key=lambda span: span.start_us):
            if span.end_us > free_us:
                own.append(Idle(rank, max(span.start_us, free_us), span.end_us, Cause.STEP_END, span.work))
                free_us = span.end_us
        return _overlaid(pieces, own)

    @cached_property
    def _last(self) -> tuple[Place | None, Op | StepEndWork | None]:
        """What ends the step, and the last op of its rank."""
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


# --- what could have run meanwhile ------------------------------------------------------------------------------------


class _Later(NamedTuple):
    """An op that the plan put later: when it was ready, how long it takes, when its turn was."""

    ready_us: int
    op: Op
    duration_us: int
    turn_us: int


def _later_ops(
    timeline: Timeline, rank: int, ready_us: Sequence[int], gaps: Sequence[int]
) -> dict[int, tuple[_Later, ...]]:
    """For each gap, given by the position of the op after it: of each task the later op that is ready first."""
    order, starts, ends = timeline.plan.orders[rank], timeline.starts_us[rank], timeline.ends_us[rank]
    first: dict[tuple[int, Kind], _Later] = {}
    found, wanted = {}, set(gaps)
    for i in range(len(order) - 1, -1, -1):
        if i in wanted:
            found[i] = tuple(first.values())
        key = order[i][:2]
        if key not in first or ready_us[i] <= first[key].ready_us:
            first[key] = _Later(ready_us[i], order[i], ends[i] - starts[i], starts[i])
    return found


def _passed_over(rank: int, later: Iterable[_Later], room: Room, gap_us: tuple[int, int], maker: Op) -> list[Idle]:
    """ORDER from when an op that the plan put later could have run to its end; MEMORY if it would not fit.

    `gap_us`: from the end of the op before to when the next one is ready. Once an op fits, others that do not matter
    no more.
    """
    start_us, ready_us = gap_us
    since: dict[Cause, tuple[int, Op]] = {}
    for other in later:
        from_us = max(start_us, other.ready_us)
        if 0 < other.duration_us <= ready_us - from_us:
            cause = Cause.ORDER if room.fits(other.op, from_us, other.turn_us) else Cause.MEMORY
            since[cause] = min(since.get(cause, (from_us, other.op)), (from_us, other.op))
    result, end_us = [], ready_us
    for cause in (Cause.ORDER, Cause.MEMORY):
        if cause in since and since[cause][0] < end_us:
            from_us, op = since[cause]
            result.append(Idle(rank, from_us, end_us, cause, maker, op))
            end_us = from_us
    return result[::-1]


# --- stretches of time ------------------------------------------------------------------------------------------------


def _overlaid(pieces: Iterable[Idle], over: Sequence[Idle]) -> list[Idle]:
    """`pieces` with those of `over` in their place where there are any; both are in order and free of overlaps."""
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


def _joined(pieces: Iterable[Idle]) -> Iterator[Idle]:
    """Of one rank; without empty ones, and with neighbours that say the same as one."""
    last: Idle | None = None
    for piece in pieces:
        if piece.start_us >= piece.end_us:
            continue
        if last is not None and piece.start_us == last.end_us and piece[3:] == last[3:]:  # cause and all beside it
            last = last._replace(end_us=piece.end_us)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last
