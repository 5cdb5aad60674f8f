"""Local search: move boundaries by one layer while that makes a cut more balanced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rota.cutting.chain import least
from rota.cutting.cut_problem import CutProblem

_MAX_MEMORY_CHECKS = 1_000


def rebalance(problem: CutProblem, boundaries: Sequence[int]) -> list[int]:
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


def balanced_memory(problem: CutProblem) -> list[int]:
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
