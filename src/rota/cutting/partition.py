"""Divide a chain into parts by one number per layer, and compute the parts' costs. Parts may be empty."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any

from rota.core.costs import Costs
from rota.core.errors import SplitError
from rota.cutting.chain import least


def uniform(num_layers: int, num_parts: int) -> list[int]:
    """Boundaries of parts with the same number of layers; the first parts have one more if that does not divide evenly.

    Raises:
        SplitError: `num_parts` is below 1.
    """
    _require_parts(num_parts)
    size, left = divmod(num_layers, num_parts)
    return [part * size + min(part, left) for part in range(num_parts + 1)]


def balanced(costs: Sequence[float], num_parts: int) -> list[int]:
    """Boundaries that minimize the cost of the most expensive part, then the sum of squares.

    Args:
        costs: One finite number of 0 or more per layer. They are added without rounding.
        num_parts: Number of parts. Once no cost is left to share, parts are empty, the last ones first; a layer that
            costs nothing stays with the one before it.

    Raises:
        SplitError: `num_parts` is below 1, or a cost is negative, infinite or NaN.
    """
    _require_parts(num_parts)
    prefix = [0, *accumulate(_whole(costs))]
    largest = max((after - before for before, after in pairwise(prefix)), default=0)
    return _least_squares(prefix, num_parts, least(largest, prefix[-1], lambda bound: _fits(prefix, num_parts, bound)))


def by_regex(names: Sequence[str], pattern: str, num_parts: int) -> list[int]:
    """Boundaries of parts with balanced numbers of the layers whose names match.

    Args:
        names: The name of each layer.
        pattern: A regular expression, searched for in the names; case does not matter.
        num_parts: Number of parts.

    Raises:
        SplitError: The pattern is not a regular expression, no name matches, or `num_parts` is below 1.
    """
    return balanced(matching(names, pattern), num_parts)


def matching(names: Sequence[str], pattern: str) -> list[bool]:
    """Whether `pattern` is found in each of the names; raises SplitError as `by_regex` does."""
    try:
        matches = [bool(re.search(pattern, name, re.IGNORECASE)) for name in names]
    except re.error as error:
        raise SplitError(f"pattern {pattern!r} is not a regular expression: {error}; fix it or escape it") from None
    if not any(matches):
        layers = ", ".join(dict.fromkeys(names)) or "none"
        raise SplitError(f"pattern {pattern!r} matches none of the layers, which are {layers}; give one that does")
    return matches


def merge(costs: Costs, boundaries: Sequence[int]) -> Costs:
    """Costs of stages that are runs of a chain's layers.

    Times and bytes add up; of peaks the largest counts; a boundary between stages has the bytes of the boundary
    between the two layers there. A stage recomputes only if all of its layers do.

    Args:
        costs: One entry per layer.
        boundaries: The stages' boundaries; no stage may be empty.

    Raises:
        PlacementError: The layers are not a chain.
    """
    costs = costs.as_chain()
    parts = [slice(*part) for part in pairwise(boundaries)]
    merged: dict[str, Any] = {}
    for field in fields(costs):
        value = getattr(costs, field.name)
        if not isinstance(value, tuple):
            continue
        if field.name in ("boundary_bytes", "gradient_bytes"):
            merged[field.name] = tuple(value[boundary - 1] for boundary in boundaries[1:-1])
        else:
            merged[field.name] = tuple(_MERGED_BY.get(field.name, sum)(value[part]) for part in parts)
    recompute = merged.get("recompute_us", [None] * len(parts))
    merged["offload_bytes"] = tuple(  # of stages that recompute, a checkpoint is all that can go
        size if us is None else min(size, kept)
        for us, size, kept in zip(recompute, merged["offload_bytes"], merged["checkpoint_bytes"], strict=True)
    )
    return replace(costs, **merged)


def _sum_or_none(times_us: Sequence[int | None]) -> int | None:
    return None if None in times_us else sum(time for time in times_us if time is not None)


_MERGED_BY: dict[str, Callable[[Any], int | None]] = {  # other fields are summed
    "forward_peak_bytes": max,
    "backward_peak_bytes": max,
    "weight_peak_bytes": max,
    "recompute_us": _sum_or_none,
    "checkpoint_bytes": itemgetter(0),
}


def _require_parts(num_parts: int) -> None:
    if num_parts < 1:
        raise SplitError(f"num_parts is {num_parts}: give at least 1")


def _whole(costs: Sequence[float]) -> list[int]:
    """The costs in a unit that makes all of them whole numbers, so that sums are exact."""
    for layer, cost in enumerate(costs):
        if not 0 <= cost < math.inf:
            raise SplitError(f"costs[{layer}] is {cost}: give a finite number of 0 or more")
    exact = [Fraction(cost) for cost in costs]
    unit = math.lcm(*(cost.denominator for cost in exact))
    return [int(cost * unit) for cost in exact]


def _fits(prefix: Sequence[int], num_parts: int, bound: int) -> bool:
    """Whether parts filled in order up to `bound`, which no single layer exceeds, hold all layers."""
    start = 0
    for _ in range(num_parts):
        start = bisect_right(prefix, prefix[start] + bound) - 1
    return start == len(prefix) - 1


def _least_squares(prefix: Sequence[int], num_parts: int, bound: int) -> list[int]:
    """Boundaries with the least sum of squares and no part over `bound`, by dynamic programming over parts and ends."""
    num_layers = len(prefix) - 1
    squares_of: list[float] = [0, *[math.inf] * num_layers]  # the least sum of squares, by end
    starts: list[list[int]] = []
    for _ in range(num_parts):
        before, squares_of, best = squares_of, [], []
        for end in range(num_layers + 1):
            best_start: tuple[float, int] = math.inf, end
            start = end
            while start >= 0 and prefix[end] - prefix[start] <= bound:
                squares = before[start] + (prefix[end] - prefix[start]) ** 2 if before[start] < math.inf else math.inf
                if squares < best_start[0]:
                    best_start = squares, start
                start -= 1
            squares_of.append(best_start[0])
            best.append(best_start[1])
        starts.append(best)
    boundaries = [num_layers]
    for best in reversed(starts):
        boundaries.append(best[boundaries[-1]])
    return boundaries[::-1]
