"""Sizes of micro-batches, and costs as functions of them."""

from __future__ import annotations

import pytest

from rota import Curve, PlacementError, Size, SizeModel


def test_sizes_of_rows_and_of_one_packed_row() -> None:
    assert Size.padded([3, 5, 2]) == Size(15, 75)
    assert Size.packed([3, 5, 2]) == Size(10, 38)


def test_costs_round_times_to_the_nearest_and_bytes_up() -> None:
    model = SizeModel(
        forward_us=(Curve(1, 0.5, 0.01), Curve(0, 0.04)),
        backward_us=(Curve(2), Curve(3)),
        weight_us=(Curve(-5), Curve(1)),
        activation_bytes=(Curve(0, 1.01), Curve(7)),
        input_frees_bytes=(Curve(0, 2), Curve(3)),
        boundary_bytes=(Curve(0.2),),
        static_bytes=(4, 5),
    )
    costs = model.costs(Size(10, 100))
    assert costs.forward_us == (7, 0)
    assert costs.weight_us == (0, 1)
    assert costs.activation_bytes == (11, 7)
    assert costs.freed_by_input == (11, 3)
    assert costs.boundary_bytes == (1,)
    assert costs.static_bytes == (4, 5)


def test_fields_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(PlacementError, match="backward_us has 1 entries; give 2"):
        SizeModel((Curve(1), Curve(1)), (Curve(1),))
    with pytest.raises(PlacementError, match="boundary_bytes has 2 entries; give 1"):
        SizeModel((Curve(1), Curve(1)), (Curve(1), Curve(1)), boundary_bytes=(Curve(1), Curve(1)))
    with pytest.raises(PlacementError, match="at least one stage"):
        SizeModel((), ())
