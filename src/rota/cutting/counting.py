"""Bounds that no cut of several stages a rank is below, by counting.

Count each layer in quanta of q µs, rounded down. A rank that has h quanta of layers, in v runs, takes at least as long
as the v cheapest runs with h quanta do, wherever they lie; and all ranks together have all quanta. So equal layers that
do not divide by the ranks are told, where the mean time is not.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import final

from rota.cutting.deal import Deal

_MOST_QUANTA = 24  # of a rank's time
_SMALLEST = (0, 1, 2)  # which layers' times, from the smallest, are quanta of a table


@final
class Counts:
    """`times`: µs that each layer takes at least."""

    def __init__(self, deal: Deal, times: Sequence[int]) -> None:
        self._deal, self._times = deal, times
        largest, small = max(times), sorted({time for time in times if time})
        chosen = [small[i] for i in (*_SMALLEST, len(small) // 8) if i < len(small)]
        quanta = {quantum for quantum in chosen if largest < _MOST_QUANTA * quantum}
        self._tables = [(quantum, self._cheapest_us(quantum)) for quantum in sorted(quanta)]

    def is_possible(self, bound: int) -> bool:
        """False where no cut keeps all ranks within `bound`."""
        left = self._deal.capacities(bound)
        if min(left) < 0 or any(spare < 0 for spare, _ in self.spares(bound)):
            return False
        for quantum, cheapest in self._tables:
            most = (self._most(us, quantum, cheapest) for us in left)
            if sum(most) < sum(time // quantum for time in self._times):
                return False
        return True

    def spares(self, bound: int) -> Iterator[tuple[int, int]]:
        """(quanta to spare on all ranks, quantum): the quanta at which the fastest rank's count is about to fall."""
        left = self._deal.capacities(bound)
        for num_quanta in range(_MOST_QUANTA):
            quantum = max(left) // (num_quanta + 1) + 1
            yield sum(us // quantum for us in left) - sum(time // quantum for time in self._times), quantum
        yield sum(left) - sum(self._times), 1

    def _most(self, left_us: int, quantum: int, cheapest: Sequence[int]) -> int:
        """Quanta that a rank with so much time can take."""
        count = bisect_right(cheapest, left_us) - 1
        return count if count + 1 < len(cheapest) else left_us // quantum

    def _cheapest_us(self, quantum: int) -> list[int]:
        """For each number of quanta the least time of as many runs as a rank has stages that have them, or more."""
        counts = [time // quantum for time in self._times]
        num_runs = self._deal.num_stages // self._deal.num_ranks
        most = 2 * -(-sum(counts) // self._deal.num_ranks) + 1
        outside = [[math.inf] * (most + 1) for _ in range(num_runs + 1)]  # by runs begun and quanta, layer by layer
        inside = [list(row) for row in outside]
        outside[0][0] = 0
        for time, count in zip(self._times, counts, strict=True):
            for run in range(num_runs, 0, -1):  # the last ones first: a run begins where the one before it has ended
                row = [math.inf] * (most + 1)
                for have, (going_on, begun) in enumerate(zip(inside[run], outside[run - 1], strict=True)):
                    us = min(going_on, begun) + time
                    if us < row[min(have + count, most)]:
                        row[min(have + count, most)] = us
                inside[run] = row
                outside[run] = list(map(min, outside[run], row))
        least = list(map(min, *outside))
        least = [*accumulate(reversed(least), min)][::-1]  # more quanta will do
        return [int(us) for us in least if us < math.inf]
