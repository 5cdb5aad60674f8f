"""One stage a rank: the exact cut, by a search for the least bound."""

from __future__ import annotations

from collections.abc import Callable

from rota.cutting.deal import Deal
from rota.cutting.runs import Fits, bands, most_even

_FIRST_STEP = 1024  # the search upwards from a bound begins with so small a part of it


def cut_chain(deal: Deal) -> list[int] | None:
    """Boundaries whose slowest rank is as fast as it can be; of those, the most even by squares. None: nothing fits."""
    fits = _within_limits(deal)

    def budgets(bound: int) -> list[int]:
        left = deal.capacities(bound)
        return [left[rank] for rank in deal.rank_of]

    def found(bound: int) -> list[int] | None:
        ends = most_even(deal, 0, 0, budgets(bound), deal.extra_us, fits)
        return None if ends is None else [0, *ends]

    if deal.is_hopeless:
        return None
    low = least(0, deal.slowest, lambda bound: bands(deal, 0, 0, budgets(bound)) is not None)
    best = found(low)
    if best is not None:
        return best
    # Memory, or a layer that only some ranks can take, asks for more time: up in growing steps, then halves.
    step, high = max(low // _FIRST_STEP, 1), low
    while best is None:
        if high == deal.slowest:
            return None
        low, high, step = high + 1, min(high + step, deal.slowest), 2 * step
        best = found(high)
    high = max(deal.times(best))
    while low < high:
        middle = (low + high) // 2
        other = found(middle)
        if other is None:
            low = middle + 1
        else:
            best, high = other, max(deal.times(other))
    return found(high)


def least(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The least number from `low` to `high` for which `holds`, as it does for `high` and for all above the least."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _within_limits(deal: Deal) -> Fits | None:
    room = deal.room
    if room is None:
        return None

    def fits(stage: int, start: int, end: int) -> bool:
        limit = room.limits[deal.rank_of[stage]]
        return limit is None or room.fits(stage, start, end, limit)

    return fits
