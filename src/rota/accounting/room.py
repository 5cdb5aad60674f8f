"""Whether an op that is ready would have fit into a rank's memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from rota.tasks import Op
from rota.timeline import Timeline


class Room:
    """What one rank has left below its limit over time."""

    def __init__(self, timeline: Timeline, rank: int) -> None:
        self._placement = timeline.plan.placement
        self._limit = self._placement.cluster.limit_bytes[rank]
        if self._limit is None:
            return
        self._times, levels = [0], [self._placement.static_bytes[rank]]
        for key, change in timeline.memory_events(rank):
            self._times.append(key // 4)
            levels.append(levels[-1] + change)
        self._most: list[list[int]] = [levels]  # _most[p][i] is the most of levels[i : i + 2**p]
        while (width := 1 << len(self._most)) <= len(levels):
            last = self._most[-1]
            self._most.append(list(map(max, last, last[width // 2 :])))

    def fits(self, op: Op, from_us: int, turn_us: int) -> bool:
        """Whether `op`, whose turn was at `turn_us`, could have run at `from_us` and kept what it keeps till then."""
        if self._limit is None:
            return True
        task = self._placement.tasks[self._placement.index[op.stage, op.kind]]
        kept, left = max(task.held_bytes, 0), bisect_right(self._times, from_us) - 1
        running = self._most[0][left] + kept + task.peak_bytes
        return max(running, self._most_within(left, bisect_left(self._times, turn_us)) + kept) <= self._limit

    def _most_within(self, left: int, right: int) -> int:
        power = max(right - left, 1).bit_length() - 1
        return max(self._most[power][left], self._most[power][max(left, right - (1 << power))])
