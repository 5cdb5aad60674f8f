"""A cut made more even by small moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rota.cutting.chain import least
from rota.cutting.deal import Deal

_MOST_WEIGHED = 1_000


def evened(deal: Deal, boundaries: Sequence[int]) -> list[int]:
    """Boundaries in a row moved by a layer, as long as that lowers what is over the limits, the slowest rank, or else
    the sum of squares.

    So a layer goes from any stage to any other, and those between shift by one. `_MOST_WEIGHED` times at most it is
    weighed what ranks hold.
    """
    num_weighed = 0
    best, times, excess = list(boundaries), deal.times(boundaries), deal.excess_bytes(boundaries)
    while True:
        now = _quality(times)
        for move in _moves(deal, best, times):
            is_faster = _quality(move.times) < now
            if not is_faster and not excess:
                continue
            if num_weighed == _MOST_WEIGHED:
                return best
            moved = _moved(best, move)
            over, num_weighed = deal.excess_bytes(moved), num_weighed + (deal.room is not None)
            if over < excess or (over == excess and is_faster):
                best, times, excess = moved, list(move.times), over
                break
        else:
            return best


def alike(deal: Deal) -> list[int]:
    """Stages that hold as much as each other, as near as filling them up one after the other comes to it."""
    room = deal.room
    assert room is not None, "without limits nothing has to hold less"

    def filled(limit: int) -> list[int]:
        result = [0]
        for stage in range(deal.num_stages - 1):
            last = deal.num_layers - (deal.num_stages - 1 - stage)
            ends = range(result[-1] + 1, last + 1)
            result.append(next((e - 1 for e in ends[1:] if not room.fits(stage, result[-1], e, limit)), last))
        return [*result, deal.num_layers]

    def is_enough(limit: int) -> bool:
        last = deal.num_stages - 1
        return room.fits(last, filled(limit)[last], deal.num_layers, limit)

    most = max(sum(room.held(stage, 0, deal.num_layers)) for stage in range(deal.num_stages))
    return filled(least(0, most, is_enough))


class _Move(NamedTuple):
    """The boundaries from `first` to `last` by `step`, and the ranks' times then (the next move changes the list)."""

    first: int
    last: int
    step: int
    times: list[int]


def _quality(times: Sequence[int]) -> tuple[int, int]:
    return max(times), sum(time * time for time in times)


def _moved(boundaries: Sequence[int], move: _Move) -> list[int]:
    return [b + move.step if move.first <= i <= move.last else b for i, b in enumerate(boundaries)]


def _moves(deal: Deal, boundaries: Sequence[int], times: Sequence[int]) -> Iterator[_Move]:
    rank_of, inner = deal.rank_of, range(1, deal.num_stages)

    def time(stage: int, layer: int) -> int:
        return (deal.prefixes[stage][layer + 1] - deal.prefixes[stage][layer]) * deal.weights[rank_of[stage]]

    for first in inner:  # a layer more before the row, one less behind it
        changed = list(times)
        changed[rank_of[first - 1]] += time(first - 1, boundaries[first])
        for last in range(first, deal.num_stages):
            changed[rank_of[last]] -= time(last, boundaries[last])
            if boundaries[last + 1] - boundaries[last] > 1:
                yield _Move(first, last, 1, changed)
            if last + 1 < deal.num_stages:
                changed[rank_of[last]] += time(last, boundaries[last + 1])
    for last in inner:  # and the other way round
        changed = list(times)
        changed[rank_of[last]] += time(last, boundaries[last] - 1)
        for first in range(last, 0, -1):
            before = first - 1
            changed[rank_of[before]] -= time(before, boundaries[first] - 1)
            if boundaries[first] - boundaries[before] > 1:
                yield _Move(first, last, -1, changed)
            if before:
                changed[rank_of[before]] += time(before, boundaries[before] - 1)
