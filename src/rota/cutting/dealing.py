"""Several stages a rank: the least slowest rank, by a search for the bound and a tree of cuts that decides each.

    rounds of stages    0 1 2 3 | 4 5 6 7 | 8 9 10 11      the tree: one stage at a time, in order
                                            ╰ the last round has a budget a stage: the program of `runs`, exact

A branch ends where what is left cannot fit, and where one with as much left in every rank has failed. To tell whether
a bound can be met is hard in general (it holds the partition problem), so the tree has at most `num_nodes`; what is
proven by then is the lower bound that the answer comes with.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import le
from typing import final

from rota.cutting.chain import least
from rota.cutting.counting import Counts
from rota.cutting.deal import Deal
from rota.cutting.evening import alike, evened
from rota.cutting.room import Held
from rota.cutting.runs import most_even

_MOST_FAILED = 48  # failures remembered for each place
_TRIED_QUANTA = 3  # that each node is counted in
_DECISIONS = 4  # that the nodes are shared out to


class _OutOfNodes(Exception):
    pass


def cut_dealt(deal: Deal, first: list[int], num_nodes: int) -> tuple[list[int] | None, int]:
    """(boundaries, a bound in units that no cut is below). None: nothing fits; `first` is where the search begins.

    Nothing at all fits where the bound is above `deal.slowest`; else nothing was found.
    """
    if deal.is_hopeless:
        return None, deal.slowest + 1
    # What a layer takes at least: stages differ by whether they recompute, and how their backward is split.
    steps = ([after - before for before, after in pairwise(prefix)] for prefix in deal.prefixes)
    times = list(map(min, *steps))
    counts = Counts(deal, times)
    tree = _Tree(deal, counts, times, num_nodes)
    low = least(0, deal.slowest, counts.is_possible)
    best = _begun(deal, first, tree)
    if best is None:
        return None, low if tree.was_cut_short else deal.slowest + 1
    proven, high = low, max(deal.times(best))
    while low < high:
        middle = (low + high) // 2
        try:
            found = tree.decide(middle)
        except _OutOfNodes:  # it is not known: what is above it may still be found
            low = middle + 1
            continue
        if found is None:
            proven = low = middle + 1
        else:
            best = evened(deal, found)
            high = max(deal.times(best))
    return best, min(proven, high)


def _begun(deal: Deal, first: list[int], tree: _Tree) -> list[int] | None:
    """A cut that fits: from stages that take alike, from stages that hold alike, or whatever the tree finds."""
    best = evened(deal, first)
    if deal.excess_bytes(best):
        best = evened(deal, alike(deal))
    if not deal.excess_bytes(best):
        return best
    try:
        found = tree.decide(deal.slowest)
    except _OutOfNodes:
        return None
    return None if found is None else evened(deal, found)


@final
class _Tree:
    """Boundaries within a bound, or that there are none."""

    def __init__(self, deal: Deal, counts: Counts, times: Sequence[int], num_nodes: int) -> None:
        self._deal, self._counts, self._times = deal, counts, times
        self._num_nodes = self._left_nodes = num_nodes
        self._stop_at = 0  # so many nodes left, this decision is given up
        self.was_cut_short = False
        self._last_round = deal.num_stages - deal.num_ranks
        self._prefix = prefix = [0, *accumulate(times)]
        self._runs = sorted({b - a for i, a in enumerate(prefix) for b in prefix[i + 1 :]})
        self._shortest = [0, *accumulate(reversed(times), min)][::-1]  # of the layers from each
        self._quanta: list[tuple[int, list[int]]] = []  # each with the layers from each in quanta
        self._most_us: list[int] = []  # of each rank within the bound, and what of it is left
        self._left_us: list[int] = []
        self._left_bytes: list[int] = []
        self._on_top: list[int] = []
        self._failed: dict[tuple[int, int], list[tuple[int, ...]]] = {}

    def decide(self, bound: int) -> list[int] | None:
        """None: there are none. Raises _OutOfNodes."""
        if not self._counts.is_possible(bound):
            return None
        deal = self._deal
        self._most_us = [bound // weight for weight in deal.weights]
        self._left_us = deal.capacities(bound)
        if deal.room is not None:
            self._left_bytes = [2**62 if limit is None else limit for limit in deal.room.limits]
        self._on_top = [0] * deal.num_ranks
        self._failed = {}
        self._quanta = []
        for _, quantum in sorted(self._counts.spares(bound))[:_TRIED_QUANTA]:
            counts = accumulate(us // quantum for us in reversed(self._times))
            self._quanta.append((quantum, [0, *counts][::-1]))
        self._stop_at = max(self._left_nodes - self._num_nodes // _DECISIONS, 0)
        ends = self._from(0, 0)
        return None if ends is None else [0, *ends]

    def _from(self, stage: int, start: int) -> list[int] | None:
        """Ends of the stages from there, with what the ranks have left."""
        if self._left_nodes <= self._stop_at:
            self.was_cut_short = True
            raise _OutOfNodes
        self._left_nodes -= 1
        if stage == self._last_round:
            return self._last_ends(start)
        if self._wastes_too_much(stage, start):
            return None
        left = (*self._left_us, *self._left_bytes, *(-top for top in self._on_top))
        failed = self._failed.setdefault((stage, start), [])
        if any(all(map(le, left, other)) for other in failed):
            return None
        rank, prefix, room = self._deal.rank_of[stage], self._deal.prefixes[stage], self._deal.room
        for end in self._ends(stage, start):
            time_us, before = prefix[end] - prefix[start], self._on_top[rank]
            if room is not None and not room.fits(stage, start, end, self._left_bytes[rank], before):
                continue
            held = Held(0, 0) if room is None else room.held(stage, start, end)
            on_top = max(before, held.on_top_bytes)
            self._take(rank, time_us, held.always_bytes, on_top)
            ends = self._from(stage + 1, end)
            self._take(rank, -time_us, -held.always_bytes, before)
            if ends is not None:
                return [end, *ends]
        if len(failed) < _MOST_FAILED:
            failed.append(left)
        return None

    def _take(self, rank: int, time_us: int, always_bytes: int, on_top_bytes: int) -> None:
        self._left_us[rank] -= time_us
        if self._deal.room is not None:
            self._left_bytes[rank] -= always_bytes
            self._on_top[rank] = on_top_bytes

    def _wastes_too_much(self, stage: int, start: int) -> bool:
        """Whether the layers from `start` are more than the ranks can still take.

        They are counted in quanta, rounded down: what a rank takes of layers is then at most what it has left. A rank
        with one stage to go takes the longest run, wherever it lies, that is no longer than what it has left.
        """
        left_us = list(self._left_us)
        for done in range(self._last_round - self._deal.num_ranks, stage):
            rank = self._deal.rank_of[done]
            i = bisect_right(self._runs, left_us[rank])
            if not i:
                return True
            left_us[rank] = self._runs[i - 1]
        if any(sum(us // quantum for us in left_us) < counts[start] for quantum, counts in self._quanta):
            return True
        room = self._deal.room
        return room is not None and sum(self._left_bytes) < room.static_bytes(start)

    def _ends(self, stage: int, start: int) -> list[int]:
        """Within the rank's time, those first that take as much of it as all stages would on average."""
        deal, rank, prefix = self._deal, self._deal.rank_of[stage], self._deal.prefixes[stage]
        num_later = deal.num_stages - stage - 1
        rounds_later = num_later // deal.num_ranks
        left_us, begin = self._left_us[rank], prefix[start]
        share = left_us * (self._prefix[-1] - self._prefix[start]) / max(sum(self._left_us), 1) / (rounds_later + 1)
        ends = []
        for end in range(start + 1, deal.num_layers - num_later + 1):
            time_us = prefix[end] - begin
            if time_us + max(rounds_later, 1) * self._shortest[end] > left_us:
                break
            ends.append((abs(time_us - share), end))
        return [end for _, end in sorted(ends)]

    def _last_ends(self, start: int) -> list[int] | None:
        deal, room = self._deal, self._deal.room
        ranks = deal.rank_of[self._last_round :]
        budgets = [self._left_us[rank] for rank in ranks]
        spent_us = [self._most_us[rank] - self._left_us[rank] for rank in ranks]

        def fits(stage: int, begin: int, end: int) -> bool:
            assert room is not None
            rank = deal.rank_of[stage]
            return room.fits(stage, begin, end, self._left_bytes[rank], self._on_top[rank])

        return most_even(deal, self._last_round, start, budgets, spent_us, None if room is None else fits)
