"""One stage per rank: the exact cut, by bisection on the slowest rank's time and dynamic programming.

For each stage the possible ends are between two bands: the layers that are left must fit into the later stages, and
full earlier stages reach only so far. Near the optimum the bands are narrow, and the dynamic program is short.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from rota.cutting.cut_problem import CutProblem

Fits = Callable[[int, int, int], bool]  # (stage, start, end): whether these layers fit in memory as that stage

_FIRST_STEP = 1024  # the first step upwards from a lower bound is this small a part of it


def cut_chain(problem: CutProblem) -> list[int] | None:
    """Boundaries that minimize the slowest rank's time, then the sum of squares; None if nothing fits in memory."""
    memory = problem.memory

    def fits(stage: int, start: int, end: int) -> bool:
        assert memory is not None
        limit = memory.limits[problem.rank_of[stage]]
        return limit is None or memory.fits(stage, start, end, limit)

    def budgets(bound: int) -> list[int]:
        return [bound // problem.weights[rank] for rank in problem.rank_of]

    def cut_within(bound: int) -> list[int] | None:
        spent = [0] * problem.num_stages
        ends = balanced_ends(problem, 0, 0, budgets(bound), spent, None if memory is None else fits)
        return None if ends is None else [0, *ends]

    if problem.exceeds_total_memory:
        return None
    low = least(0, problem.upper_bound, lambda bound: _bands(problem, 0, 0, budgets(bound)) is not None)
    best = cut_within(low)
    if best is not None:
        return best
    # Memory, or a layer that fits only some ranks, needs a larger bound: double the step until a cut fits, then bisect.
    step, high = max(low // _FIRST_STEP, 1), low
    while best is None:
        if high == problem.upper_bound:
            return None
        low, high, step = high + 1, min(high + step, problem.upper_bound), 2 * step
        best = cut_within(high)
    high = max(problem.rank_times(best))
    while low < high:
        middle = (low + high) // 2
        boundaries = cut_within(middle)
        if boundaries is None:
            low = middle + 1
        else:
            high = max(problem.rank_times(boundaries))
    return cut_within(high)


def least(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The least number from `low` to `high` for which `holds` is true; it must be monotone, and true for `high`."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _bands(problem: CutProblem, first: int, start: int, budgets_us: Sequence[int]) -> list[range] | None:
    """The possible ends of each stage from `first`, which begins at `start`; None if a stage has no possible end."""
    stages = range(first, problem.num_stages)
    highs, high = [], start
    for stage, budget in zip(stages, budgets_us, strict=True):
        prefix = problem.prefixes[stage]
        high = min(bisect_right(prefix, prefix[high] + budget) - 1, problem.num_layers - (stages[-1] - stage))
        highs.append(high)
    if high < problem.num_layers:
        return None
    lows, low = [problem.num_layers], problem.num_layers
    for i in range(len(stages) - 1, 0, -1):
        prefix = problem.prefixes[stages[i]]
        low = max(bisect_left(prefix, prefix[low] - budgets_us[i]), start + i)
        lows.append(low)
    bands = [range(low, high + 1) for low, high in zip(reversed(lows), highs, strict=True)]
    return bands if all(bands) else None


def balanced_ends(
    problem: CutProblem,
    first: int,
    start: int,
    budgets_us: Sequence[int],
    spent_us: Sequence[int],
    fits: Fits | None,
) -> list[int] | None:
    """Ends of the stages from `first`, which begins at `start`, within the budgets, with the least sum of squares.

    `spent_us`: other time of each stage's rank. No stage is empty. None if nothing fits.
    """
    possible = _bands(problem, first, start, budgets_us)
    if possible is None:
        return None
    best = {start: 0}  # end -> least sum of squares
    steps: list[dict[int, int]] = []
    for i, ends in enumerate(possible):
        stage = first + i
        prefix, weight = problem.prefixes[stage], problem.weights[problem.rank_of[stage]]
        least_squares: dict[int, int] = {}
        came_from: dict[int, int] = {}
        for begin, squares in best.items():
            before, latest = spent_us[i] - prefix[begin], prefix[begin] + budgets_us[i]
            for end in range(max(begin + 1, ends.start), ends.stop):
                if prefix[end] > latest:
                    break
                if fits is not None and not fits(stage, begin, end):
                    continue
                total = squares + ((before + prefix[end]) * weight) ** 2
                if end not in least_squares or total < least_squares[end]:
                    least_squares[end], came_from[end] = total, begin
        best = least_squares
        steps.append(came_from)
    if problem.num_layers not in best:
        return None
    result = [problem.num_layers]
    for came_from in reversed(steps):
        result.append(came_from[result[-1]])
    return result[-2::-1]
