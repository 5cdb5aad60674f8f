"""One number a layer, shared out to parts of a chain. Parts may be empty."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from rota.errors import SplitError


def uniform(num_layers: int, num_parts: int) -> list[int]:
    """Boundaries of parts with as many layers each, the first ones with one more where it does not divide."""
    _require_parts(num_parts)
    each, left = divmod(num_layers, num_parts)
    return [part * each + min(part, left) for part in range(num_parts + 1)]


def balanced(costs: Sequence[float], num_parts: int) -> list[int]:
    """Boundaries whose most expensive part is as cheap as it can be; of those, the most even by squares.

    Costs are finite numbers of 0 or more, added up without rounding. Where there is no cost left to share, parts are
    empty, the last ones first; a layer that costs nothing stays with the one before it. Raises SplitError.
    """
    _require_parts(num_parts)
    prefix = [0, *accumulate(_whole(costs))]
    return _most_even(prefix, num_parts, _least_bound(prefix, num_parts))


def by_parameters(num_parameters: Sequence[int], num_parts: int) -> list[int]:
    """Boundaries of parts with parameters as even as can be; their bytes will do as well. Raises SplitError."""
    return balanced(num_parameters, num_parts)


def by_regex(names: Sequence[str], pattern: str, num_parts: int) -> list[int]:
    """Boundaries of parts with as many of the layers in whose names `pattern` is found, upper or lower case.

    Raises SplitError where it is found in none, or is no pattern.
    """
    return balanced(matching(names, pattern), num_parts)


def matching(names: Sequence[str], pattern: str) -> list[bool]:
    """For each of the layers whether `pattern` is found in its name; raises as `by_regex`."""
    try:
        found = [bool(re.search(pattern, name, re.IGNORECASE)) for name in names]
    except re.error as error:
        raise SplitError(f"pattern {pattern!r} is no regular expression: {error}; fix it, or escape it") from None
    if not any(found):
        known = ", ".join(dict.fromkeys(names)) or "none"
        raise SplitError(f"pattern {pattern!r} finds none of the layers, which are {known}; give one that does")
    return found


def _require_parts(num_parts: int) -> None:
    if num_parts < 1:
        raise SplitError(f"num_parts is {num_parts}: give at least 1")


def _whole(costs: Sequence[float]) -> list[int]:
    """The costs in a unit in which all are whole numbers, so that sums are exact."""
    for layer, cost in enumerate(costs):
        if not 0 <= cost < math.inf:
            raise SplitError(f"costs[{layer}] is {cost}: give a finite number of 0 or more")
    exact = [Fraction(cost) for cost in costs]
    unit = math.lcm(*(cost.denominator for cost in exact))
    return [int(cost * unit) for cost in exact]


def _least_bound(prefix: Sequence[int], num_parts: int) -> int:
    """The smallest cost that no part need exceed."""
    low = max((after - before for before, after in pairwise(prefix)), default=0)
    high = prefix[-1]
    while low < high:
        middle = (low + high) // 2
        if _fits(prefix, num_parts, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _fits(prefix: Sequence[int], num_parts: int, bound: int) -> bool:
    """Whether parts filled up to `bound`, which each layer alone does not exceed, take all layers."""
    start = 0
    for _ in range(num_parts):
        start = bisect_right(prefix, prefix[start] + bound) - 1
    return start == len(prefix) - 1


def _most_even(prefix: Sequence[int], num_parts: int, bound: int) -> list[int]:
    """By dynamic programming over (parts, layers): the least sum of squares with no part over `bound`."""
    num_layers = len(prefix) - 1
    least: list[float] = [0, *[math.inf] * num_layers]
    starts: list[list[int]] = []
    for _ in range(num_parts):
        before, least, best = least, [], []
        for end in range(num_layers + 1):
            found: tuple[float, int] = math.inf, end
            start = end
            while start >= 0 and prefix[end] - prefix[start] <= bound:
                squares = before[start] + (prefix[end] - prefix[start]) ** 2 if before[start] < math.inf else math.inf
                if squares < found[0]:
                    found = squares, start
                start -= 1
            least.append(found[0])
            best.append(found[1])
        starts.append(best)
    boundaries = [num_layers]
    for best in reversed(starts):
        boundaries.append(best[boundaries[-1]])
    return boundaries[::-1]
