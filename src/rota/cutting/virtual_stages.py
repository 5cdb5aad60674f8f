"""Several stages per rank: bisection on the slowest rank's time; a tree search decides each bound. Then local search.

    rounds of stages    0 1 2 3 | 4 5 6 7 | 8 9 10 11      the tree: one stage at a time, in order
                                            ╰ last round: one budget per stage, solved exactly by `chain.balanced_ends`

A branch ends if the remaining layers cannot fit, or if a state with at least as much left on every rank has failed
before. The decision is NP-hard (partition is a special case), so the tree has a limited number of nodes. The answer
comes with the lower bound that is proven by then.

Counting gives lower bounds: each layer has a number of quanta of q µs, rounded down, and all ranks together must fit
all quanta. So the bound sees that equal layers do not divide evenly among the ranks; the mean does not.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from operator import le
from typing import NamedTuple, final

from rota.cutting.chain import CutProblem, StageBytes, balanced_ends, least

_MAX_FAILURES = 48  # failed states remembered per (stage, first layer)
_NUM_NODE_QUANTA = 3  # quanta by which each node of the tree is bounded
_NUM_DECISIONS = 4  # one decision may use this fraction of the nodes
_MAX_QUANTA = 24  # of a rank's time
_MAX_MEMORY_CHECKS = 1_000  # of one local search


class _OutOfNodes(Exception):
    pass


def cut_virtual_stages(problem: CutProblem, first: list[int], num_nodes: int) -> tuple[list[int] | None, int]:
    """Boundaries, and a lower bound in units on the slowest rank of any cut; the search begins with the cut `first`.

    The boundaries are None if no cut was found. Then a bound above `problem.upper_bound` proves that none exists.
    """
    if problem.exceeds_total_memory:
        return None, problem.upper_bound + 1
    # A layer's least time over the stages: these differ by whether they recompute.
    steps = ([after - before for before, after in pairwise(prefix)] for prefix in problem.prefixes)
    times_us = list(map(min, *steps))
    tree = _Tree(problem, times_us, num_nodes)
    low = least(0, problem.upper_bound, tree.is_possible)
    best = _first_fit(problem, first, tree)
    if best is None:
        return None, low if tree.was_cut_short else problem.upper_bound + 1
    proven, high = low, max(problem.rank_times(best))
    while low < high:
        middle = (low + high) // 2
        try:
            boundaries = tree.decide(middle)
        except _OutOfNodes:  # unknown: a larger bound may still be decided
            low = middle + 1
            continue
        if boundaries is None:
            proven = low = middle + 1
        else:
            best = _rebalance(problem, boundaries)
            high = max(problem.rank_times(best))
    return best, min(proven, high)


def _first_fit(problem: CutProblem, first: list[int], tree: _Tree) -> list[int] | None:
    """A cut that fits: made from stages of equal time, from stages of equal memory, or found by the tree."""
    best = _rebalance(problem, first)
    if problem.excess_bytes(best):
        best = _rebalance(problem, _balanced_memory(problem))
    if not problem.excess_bytes(best):
        return best
    try:
        boundaries = tree.decide(problem.upper_bound)
    except _OutOfNodes:
        return None
    return None if boundaries is None else _rebalance(problem, boundaries)


def _spare_quanta(problem: CutProblem, times_us: Sequence[int], bound: int) -> Iterator[tuple[int, int]]:
    """(spare quanta of all ranks, quantum in µs), for quanta that the fastest rank can just not fit once more.

    `times_us[layer]` is a lower bound on the layer's time. If any number of spare quanta is negative, no cut keeps all
    ranks within `bound`.
    """
    budgets_us = problem.budgets_us(bound)
    for num_quanta in range(_MAX_QUANTA):
        quantum = max(budgets_us) // (num_quanta + 1) + 1
        needed = sum(time // quantum for time in times_us)
        yield sum(us // quantum for us in budgets_us) - needed, quantum
    yield sum(budgets_us) - sum(times_us), 1


@final
class _Tree:
    """Finds boundaries within a bound, or proves that there are none."""

    def __init__(self, problem: CutProblem, times_us: Sequence[int], num_nodes: int) -> None:
        self._problem, self._times_us = problem, times_us
        self._num_nodes = self._left_nodes = num_nodes
        self._stop_at = 0  # a decision is given up when this many nodes are left
        self.was_cut_short = False
        self._last_round = problem.num_stages - problem.num_ranks
        self._prefix = prefix = [0, *accumulate(times_us)]
        self._run_times_us = sorted({b - a for i, a in enumerate(prefix) for b in prefix[i + 1 :]})
        self._shortest_us = [0, *accumulate(reversed(times_us), min)][::-1]  # shortest layer from each on
        self._quanta: list[tuple[int, list[int]]] = []  # quantum, and the quanta of all layers from each on
        self._budgets_us: list[int] = []  # by rank: the whole budget, and the rest of it
        self._left_us: list[int] = []
        self._left_bytes: list[int] = []
        self._peak_bytes: list[int] = []
        self._failed: dict[tuple[int, int], list[tuple[int, ...]]] = {}

    def is_possible(self, bound: int) -> bool:
        """False if counting proves that no cut keeps all ranks within `bound`."""
        return all(spare >= 0 for spare, _ in _spare_quanta(self._problem, self._times_us, bound))

    def decide(self, bound: int) -> list[int] | None:
        """Boundaries within the bound, or None if there are none. Raises _OutOfNodes."""
        if not self.is_possible(bound):
            return None
        problem = self._problem
        self._budgets_us = problem.budgets_us(bound)
        self._left_us = [*self._budgets_us]
        if problem.memory is not None:
            self._left_bytes = [2**62 if limit is None else limit for limit in problem.memory.limits]
        self._peak_bytes = [0] * problem.num_ranks
        self._failed = {}
        self._quanta = []
        for _, quantum in sorted(_spare_quanta(problem, self._times_us, bound))[:_NUM_NODE_QUANTA]:
            counts = accumulate(us // quantum for us in reversed(self._times_us))
            self._quanta.append((quantum, [0, *counts][::-1]))
        self._stop_at = max(self._left_nodes - self._num_nodes // _NUM_DECISIONS, 0)
        ends = self._ends_from(0, 0)
        return None if ends is None else [0, *ends]

    def _ends_from(self, stage: int, start: int) -> list[int] | None:
        """Ends of the stages from `stage` on, within the ranks' remaining budgets."""
        if self._left_nodes <= self._stop_at:
            self.was_cut_short = True
            raise _OutOfNodes
        self._left_nodes -= 1
        if stage == self._last_round:
            return self._last_ends(start)
        if self._exceeds_budgets(stage, start):
            return None
        left = (*self._left_us, *self._left_bytes, *(-peak for peak in self._peak_bytes))
        failed = self._failed.setdefault((stage, start), [])
        if any(all(map(le, left, earlier)) for earlier in failed):
            return None
        rank, prefix, memory = self._problem.rank_of[stage], self._problem.prefixes[stage], self._problem.memory
        for end in self._candidate_ends(stage, start):
            time_us, before = prefix[end] - prefix[start], self._peak_bytes[rank]
            if memory is not None and not memory.fits(stage, start, end, self._left_bytes[rank], before):
                continue
            needed = StageBytes(0, 0) if memory is None else memory.needed(stage, start, end)
            self._spend(rank, time_us, needed.held_bytes, max(before, needed.peak_bytes))
            ends = self._ends_from(stage + 1, end)
            self._spend(rank, -time_us, -needed.held_bytes, before)
            if ends is not None:
                return [end, *ends]
        if len(failed) < _MAX_FAILURES:
            failed.append(left)
        return None

    def _spend(self, rank: int, time_us: int, held_bytes: int, peak_bytes: int) -> None:
        self._left_us[rank] -= time_us
        if self._problem.memory is not None:
            self._left_bytes[rank] -= held_bytes
            self._peak_bytes[rank] = peak_bytes

    def _exceeds_budgets(self, stage: int, start: int) -> bool:
        """Whether the layers from `start` on provably do not fit into the ranks' remaining budgets.

        Time is counted in quanta, rounded down. A rank with one stage left fits at most the longest run of layers,
        wherever it is, that is no longer than what the rank has left.
        """
        left_us = list(self._left_us)
        for earlier in range(self._last_round - self._problem.num_ranks, stage):
            rank = self._problem.rank_of[earlier]
            i = bisect_right(self._run_times_us, left_us[rank])
            if not i:
                return True
            left_us[rank] = self._run_times_us[i - 1]
        if any(sum(us // quantum for us in left_us) < counts[start] for quantum, counts in self._quanta):
            return True
        memory = self._problem.memory
        return memory is not None and sum(self._left_bytes) < memory.least_static_bytes(start)

    def _candidate_ends(self, stage: int, start: int) -> list[int]:
        """Ends within the rank's time, those first whose stage takes close to the average share of it."""
        problem, rank, prefix = self._problem, self._problem.rank_of[stage], self._problem.prefixes[stage]
        num_later = problem.num_stages - stage - 1
        rounds_later = num_later // problem.num_ranks
        left_us, begin = self._left_us[rank], prefix[start]
        share = left_us * (self._prefix[-1] - self._prefix[start]) / max(sum(self._left_us), 1) / (rounds_later + 1)
        ends = []
        for end in range(start + 1, problem.num_layers - num_later + 1):
            time_us = prefix[end] - begin
            if time_us + max(rounds_later, 1) * self._shortest_us[end] > left_us:
                break
            ends.append((abs(time_us - share), end))
        return [end for _, end in sorted(ends)]

    def _last_ends(self, start: int) -> list[int] | None:
        """Ends of the last round, one stage per rank, by the exact program."""
        problem, memory = self._problem, self._problem.memory
        ranks = problem.rank_of[self._last_round :]
        budgets_us = [self._left_us[rank] for rank in ranks]
        spent_us = [self._budgets_us[rank] - self._left_us[rank] for rank in ranks]

        def fits(stage: int, begin: int, end: int) -> bool:
            assert memory is not None
            rank = problem.rank_of[stage]
            return memory.fits(stage, begin, end, self._left_bytes[rank], self._peak_bytes[rank])

        return balanced_ends(problem, self._last_round, start, budgets_us, spent_us, None if memory is None else fits)


# --- local search -----------------------------------------------------------------------------------------------------


def _rebalance(problem: CutProblem, boundaries: Sequence[int]) -> list[int]:
    """Move consecutive boundaries by one layer while that improves the cut.

    A cut is better if it has fewer excess bytes, then if its slowest rank is faster, then by the sum of squares. A move
    takes a layer from any stage to any other; the stages between them shift by one layer. The search ends after
    `_MAX_MEMORY_CHECKS` moves whose memory it had to compute.
    """
    num_checks = 0
    best, times, excess = list(boundaries), problem.rank_times(boundaries), problem.excess_bytes(boundaries)
    while True:
        quality = _quality(times)
        for move in _moves(problem, best, times):
            is_faster = _quality(move.rank_times) < quality
            if not is_faster and not excess:
                continue
            if num_checks == _MAX_MEMORY_CHECKS:
                return best
            moved = [b + move.step if move.first <= i <= move.last else b for i, b in enumerate(best)]
            over, num_checks = problem.excess_bytes(moved), num_checks + (problem.memory is not None)
            if over < excess or (over == excess and is_faster):
                best, times, excess = moved, list(move.rank_times), over
                break
        else:
            return best


def _balanced_memory(problem: CutProblem) -> list[int]:
    """Boundaries of stages that need about equal memory, found by filling them in order up to the least limit."""
    memory = problem.memory
    assert memory is not None, "without limits there is no memory to balance"

    def filled(limit: int) -> list[int]:
        result = [0]
        for stage in range(problem.num_stages - 1):
            last = problem.num_layers - (problem.num_stages - 1 - stage)
            ends = range(result[-1] + 1, last + 1)
            result.append(next((e - 1 for e in ends[1:] if not memory.fits(stage, result[-1], e, limit)), last))
        return [*result, problem.num_layers]

    def is_enough(limit: int) -> bool:
        return memory.fits(problem.num_stages - 1, filled(limit)[-2], problem.num_layers, limit)

    high = max(sum(memory.needed(stage, 0, problem.num_layers)) for stage in range(problem.num_stages))
    return filled(least(0, high, is_enough))


class _Move(NamedTuple):
    """Boundaries `first` to `last` moved by `step`, and the ranks' times after it (the next move changes the list)."""

    first: int
    last: int
    step: int
    rank_times: list[int]


def _quality(rank_times: Sequence[int]) -> tuple[int, int]:
    return max(rank_times), sum(time * time for time in rank_times)


def _moves(problem: CutProblem, boundaries: Sequence[int], rank_times: Sequence[int]) -> Iterator[_Move]:
    rank_of, inner = problem.rank_of, range(1, problem.num_stages)

    def time(stage: int, layer: int) -> int:
        prefix = problem.prefixes[stage]
        return (prefix[layer + 1] - prefix[layer]) * problem.weights[rank_of[stage]]

    for first in inner:  # the stage before `first` gains a layer, the stage that begins at `last` loses one
        changed = list(rank_times)
        changed[rank_of[first - 1]] += time(first - 1, boundaries[first])
        for last in range(first, problem.num_stages):
            changed[rank_of[last]] -= time(last, boundaries[last])
            if boundaries[last + 1] - boundaries[last] > 1:
                yield _Move(first, last, 1, changed)
            if last + 1 < problem.num_stages:
                changed[rank_of[last]] += time(last, boundaries[last + 1])
    for last in inner:  # the other direction
        changed = list(rank_times)
        changed[rank_of[last]] += time(last, boundaries[last] - 1)
        for first in range(last, 0, -1):
            before = first - 1
            changed[rank_of[before]] -= time(before, boundaries[first] - 1)
            if boundaries[first] - boundaries[before] > 1:
                yield _Move(first, last, -1, changed)
            if before:
                changed[rank_of[before]] += time(before, boundaries[before] - 1)
