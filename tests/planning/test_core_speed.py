"""How fast cores are, and which measurements were made at about the same speed."""

from __future__ import annotations

import pytest

from rota.planning.core_speed import common_us, computation_us, is_alike, slowdown


def test_a_computation_takes_time() -> None:
    assert computation_us() > 0


def test_times_within_a_tenth_are_alike_either_way() -> None:
    assert is_alike(1000, 1099)
    assert is_alike(1099, 1000)
    assert not is_alike(1000, 1101)
    assert slowdown([1000.0, 2000.0, 1500.0]) == 2
    assert slowdown([]) == 1


@pytest.mark.parametrize(
    ("of_groups", "common"),
    [
        ([], 0.0),
        ([[]], 0.0),
        ([[2000.0, 4000.0], [4050.0]], 4000.0),  # the only speed of both
        ([[2000.0, 4000.0, 4100.0], [4050.0, 2050.0]], 4000.0),  # both have both, but the slow one more often
        ([[2000.0, 4000.0], [4050.0, 2050.0]], 2000.0),  # the fast one of two that are as frequent
        ([[2000.0, 2010.0, 2020.0], [4000.0]], 2000.0),  # none of both: of most measurements
    ],
)
def test_the_speed_of_most_groups_counts_then_of_most_measurements(of_groups: list[list[float]], common: float) -> None:
    assert common_us(of_groups) == common
