"""Stages in a row, each with a budget of its own: the most even cut within the budgets, exactly.

For each stage the ends that are possible lie between two bands: what is left must fit into the stages after it, and
it cannot reach further than full stages do. Near the optimum the bands are narrow, and the program between them short.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from rota.cutting.deal import Deal

Fits = Callable[[int, int, int], bool]  # stage, start, end: whether it holds no more than it may


def bands(deal: Deal, first: int, start: int, budgets: Sequence[int]) -> list[range] | None:
    """For each stage from `first` the ends that it may have at most, if `first` begins at `start`; None if there is one
    without.

    `budgets`: µs of each of these stages.
    """
    stages = range(first, deal.num_stages)
    if min(budgets) < 0:
        return None
    highs, high = [], start
    for stage, budget in zip(stages, budgets, strict=True):
        prefix = deal.prefixes[stage]
        high = min(bisect_right(prefix, prefix[high] + budget) - 1, deal.num_layers - (stages[-1] - stage))
        highs.append(high)
    if high < deal.num_layers:
        return None
    lows, low = [deal.num_layers], deal.num_layers
    for i in range(len(stages) - 1, 0, -1):
        prefix = deal.prefixes[stages[i]]
        low = max(bisect_left(prefix, prefix[low] - budgets[i]), start + i)
        lows.append(low)
    found = [range(low, high + 1) for low, high in zip(reversed(lows), highs, strict=True)]
    return found if all(found) else None


def most_even(
    deal: Deal, first: int, start: int, budgets: Sequence[int], spent_us: Sequence[int], fits: Fits | None
) -> list[int] | None:
    """Ends of the stages from `first`, which begins at `start`: of those within the budgets, the least sum of squares.

    `spent_us`: what each stage's rank takes besides. No stage is empty. None where nothing fits.
    """
    possible = bands(deal, first, start, budgets)
    if possible is None:
        return None
    best = {start: 0}  # by end, the least sum of squares
    steps: list[dict[int, int]] = []
    for i, ends in enumerate(possible):
        stage = first + i
        prefix, weight = deal.prefixes[stage], deal.weights[deal.rank_of[stage]]
        found: dict[int, int] = {}
        came_from: dict[int, int] = {}
        for begin, squares in best.items():
            before, most = spent_us[i] - prefix[begin], prefix[begin] + budgets[i]
            for end in range(max(begin + 1, ends.start), ends.stop):
                if prefix[end] > most:
                    break
                if fits is not None and not fits(stage, begin, end):
                    continue
                total = squares + ((before + prefix[end]) * weight) ** 2
                if end not in found or total < found[end]:
                    found[end], came_from[end] = total, begin
        best = found
        steps.append(came_from)
    if deal.num_layers not in best:
        return None
    result = [deal.num_layers]
    for came_from in reversed(steps):
        result.append(came_from[result[-1]])
    return result[-2::-1]
