"""Cuts of a chain against all there are."""

from fractions import Fraction
from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given, strategies as st

from rota import Costs, PlacementError, SplitError
from rota.cutting import balanced, merge, uniform

WHOLE = st.lists(st.integers(0, 9), max_size=8)
FLOATS = st.lists(st.floats(0, 1e12, allow_subnormal=False), max_size=7)


def parts_of(costs: list[float], boundaries: list[int]) -> list[Fraction]:
    return [sum(map(Fraction, costs[a:b]), Fraction(0)) for a, b in pairwise(boundaries)]


def best(costs: list[float], num_parts: int) -> tuple[Fraction, Fraction]:
    """Of all cuts: the smallest largest part, and then the smallest sum of squares."""
    inner = combinations_with_replacement(range(len(costs) + 1), num_parts - 1)
    return min(quality(parts_of(costs, [0, *cuts, len(costs)])) for cuts in inner)


def quality(parts: list[Fraction]) -> tuple[Fraction, Fraction]:
    return max(parts), sum((part**2 for part in parts), Fraction(0))


@given(st.one_of(WHOLE, FLOATS), st.integers(1, 5))
def test_no_cut_is_better(costs: list[float], num_parts: int) -> None:
    boundaries = balanced(costs, num_parts)
    assert len(boundaries) == num_parts + 1
    assert (boundaries[0], boundaries[-1]) == (0, len(costs))
    assert boundaries == sorted(boundaries)
    assert quality(parts_of(costs, boundaries)) == best(costs, num_parts)


@pytest.mark.parametrize(
    ("costs", "num_parts", "boundaries"),
    [
        ([3, 1, 2, 5, 4, 2], 3, [0, 3, 4, 6]),
        ([100, 1, 1, 1, 97], 3, [0, 1, 4, 5]),
        ([1, 1], 4, [0, 1, 2, 2, 2]),  # the last parts are empty
        ([5, 0, 5], 2, [0, 2, 3]),  # what costs nothing stays with the one before it
        ([], 2, [0, 0, 0]),
        ([0.1] * 10, 2, [0, 5, 10]),  # rounded sums would differ
        ([1e300, 1e-300], 2, [0, 1, 2]),
    ],
)
def test_cuts(costs: list[float], num_parts: int, boundaries: list[int]) -> None:
    assert balanced(costs, num_parts) == boundaries


def test_a_thousand_layers() -> None:
    costs = [i * 7919 % 1000 + 1 for i in range(1000)]
    boundaries = balanced(costs, 16)
    largest = max(parts_of(costs, boundaries))
    assert Fraction(sum(costs), 16) <= largest < Fraction(sum(costs), 16) + max(costs)


@pytest.mark.parametrize(
    ("num_layers", "num_parts", "boundaries"),
    [(8, 4, [0, 2, 4, 6, 8]), (10, 4, [0, 3, 6, 8, 10]), (2, 4, [0, 1, 2, 2, 2]), (0, 2, [0, 0, 0])],
)
def test_uniform(num_layers: int, num_parts: int, boundaries: list[int]) -> None:
    assert uniform(num_layers, num_parts) == boundaries


@pytest.mark.parametrize("cost", [-1, float("nan"), float("inf")])
def test_costs_that_are_none_are_refused(cost: float) -> None:
    with pytest.raises(SplitError, match=rf"costs\[1\] is {cost}: give a finite number of 0 or more"):
        balanced([1, cost], 2)


def test_no_parts_are_refused() -> None:
    for cut in (lambda: balanced([1], 0), lambda: uniform(1, 0)):
        with pytest.raises(SplitError, match="num_parts is 0: give at least 1"):
            cut()


def test_costs_of_merged_layers() -> None:
    costs = Costs(
        (1, 2, 3, 4),
        (5, 6, 7, 8),
        weight_us=(1, 1, 2, 2),
        activation_bytes=10,
        boundary_bytes=(7, 8, 9),
        gradient_bytes=4,
        forward_peak_bytes=(3, 9, 5, 1),
        static_bytes=(1, 2, 4, 8),
        recompute_us=(1, 2, 3, None),
        checkpoint_bytes=(1, 2, 3, 4),
        edges=((0, 1), (1, 2), (2, 3)),
        note="told",
    )
    assert merge(costs, [0, 1, 3, 4]) == Costs(
        (1, 5, 4),
        (5, 13, 8),
        weight_us=(1, 3, 2),
        activation_bytes=(10, 20, 10),
        boundary_bytes=(7, 9),
        gradient_bytes=4,
        forward_peak_bytes=(3, 9, 1),
        static_bytes=(1, 6, 8),
        recompute_us=(1, 5, None),
        checkpoint_bytes=(1, 2, 4),
        note="told",
    )
    assert merge(costs, [0, 4]).recompute_us == (None,)
    with pytest.raises(PlacementError, match="this needs a chain"):
        merge(Costs.uniform(3, edges=((0, 1), (0, 2))), [0, 3])
