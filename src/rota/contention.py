"""Contention: what is lost to others by those who share cores or a link, if all get fair shares."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise


class Contention:
    """How many of `num_places` are in use over time: cores by busy ranks, a link by transfers.

    `times_us`: (start, end) of each use.
    """

    def __init__(self, times_us: Iterable[tuple[int, int]], num_places: int) -> None:
        self.num_places = num_places
        changes = [change for start, end in times_us for change in ((start, 1), (max(start, end), -1))]
        self._times, self._busy, self._lost = [0], [0], [0.0]  # _lost: cumulative, of an op that runs from 0
        for time, change in sorted(changes):
            share = max(0.0, 1 - num_places / self._busy[-1]) if self._busy[-1] else 0.0
            self._lost.append(self._lost[-1] + share * (time - self._times[-1]))
            self._times.append(time)
            self._busy.append(self._busy[-1] + change)

    def lost_us(self, start_us: int, end_us: int) -> int:
        """Time that a use of this interval lost, if all uses share the places fairly."""
        return int(self._lost_until(end_us) - self._lost_until(start_us))

    def _lost_until(self, time_us: int) -> float:
        i = bisect_right(self._times, time_us) - 1
        share = max(0.0, 1 - self.num_places / self._busy[i]) if self._busy[i] else 0.0
        return self._lost[i] + share * (time_us - self._times[i])

    def full_intervals(self, start_us: int, end_us: int) -> Iterator[tuple[int, int]]:
        """The parts of an idle interval in which others use all places."""
        first, last = bisect_right(self._times, start_us) - 1, bisect_right(self._times, end_us)
        inner = [time for time in self._times[first + 1 : last] if start_us < time < end_us]
        for a, b in pairwise([start_us, *inner, end_us]):
            if a < b and self._busy[bisect_right(self._times, a) - 1] >= self.num_places:
                yield a, b
