"""What is beyond the plan: ops that take longer than planned, and ranks that share too few cores."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from rota.accounting.causes import Cause
from rota.accounting.readiness import Place, Readiness
from rota.errors import PlanError
from rota.tasks import Op
from rota.timeline import Timeline


class Piece(NamedTuple):
    start_us: int
    end_us: int
    cause: Cause
    op: Op


class Crowd:
    """How many are busy over time, in `num_places`: ranks on cores, transfers on a link.

    `times_us`: (start, end) of each.
    """

    def __init__(self, times_us: Iterable[tuple[int, int]], num_places: int) -> None:
        self.num_places = num_places
        changes = [change for start, end in times_us for change in ((start, 1), (max(start, end), -1))]
        self._times, self._busy, self._lost = [0], [0], [0.0]  # _lost: by an op that ran since 0
        for time, change in sorted(changes):
            share = max(0.0, 1 - num_places / self._busy[-1]) if self._busy[-1] else 0.0
            self._lost.append(self._lost[-1] + share * (time - self._times[-1]))
            self._times.append(time)
            self._busy.append(self._busy[-1] + change)

    def lost_us(self, start_us: int, end_us: int) -> int:
        """What one of that time would have been faster by in a place of its own, if all share the places fairly."""
        return int(self._lost_until(end_us) - self._lost_until(start_us))

    def _lost_until(self, time_us: int) -> float:
        i = bisect_right(self._times, time_us) - 1
        share = max(0.0, 1 - self.num_places / self._busy[i]) if self._busy[i] else 0.0
        return self._lost[i] + share * (time_us - self._times[i])

    def full(self, start_us: int, end_us: int) -> Iterator[tuple[int, int]]:
        """The stretches in which others have all places, of a time in which one is idle."""
        first, last = bisect_right(self._times, start_us) - 1, bisect_right(self._times, end_us)
        inner = [time for time in self._times[first + 1 : last] if start_us < time < end_us]
        for a, b in pairwise([start_us, *inner, end_us]):
            if a < b and self._busy[bisect_right(self._times, a) - 1] >= self.num_places:
                yield a, b


class Lateness:
    """Where a timeline's ops run longer than `planned` has them."""

    def __init__(self, readiness: Readiness, planned: Timeline, crowd: Crowd | None) -> None:
        self._readiness, self._crowd = readiness, crowd
        self._planned_us: list[dict[Op, int]] = [{} for _ in range(planned.num_ranks)]
        for rank, order in enumerate(planned.plan.orders):
            times = zip(order, planned.starts_us[rank], planned.ends_us[rank], strict=True)
            self._planned_us[rank] = {op: end - start for op, start, end in times}
        for rank, order in enumerate(readiness.plan.orders):
            known = self._planned_us[rank] if rank < planned.num_ranks else {}
            if (other := next((op for op in order if op not in known), None)) is not None:
                raise PlanError(
                    f"the plan has no {other} on rank {rank}; explain a timeline by its own plan", "unknown"
                )

    def upstream(self, last: Place, since_us: int) -> Iterator[Piece]:
        """Backwards from `last` along what waited for what: the time beyond plan after `since_us`, latest first."""
        place: Place | None = last
        while place is not None and self._readiness.end_us(place) > since_us:
            yield from self._beyond(place, since_us)
            place = self._readiness.before(place) if self._readiness.start_us(place) > since_us else None

    def _beyond(self, place: Place, since_us: int) -> Iterator[Piece]:
        op, start, end = self._readiness.op(place), self._readiness.start_us(place), self._readiness.end_us(place)
        due = start + self._planned_us[place.rank][op]
        if due >= end:
            return
        lost = self._crowd.lost_us(start, end) if self._crowd else 0
        middle = min(due + lost, end)
        for a, b, cause in ((middle, end, Cause.SLOWER), (due, middle, Cause.CORES)):
            if max(a, since_us) < b:
                yield Piece(max(a, since_us), b, cause, op)
