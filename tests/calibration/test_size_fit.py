"""Costs as functions of sizes, and fitted to costs at some sizes: what was put in comes out, and the error is said."""

import random

import pytest
from hypothesis import given, settings, strategies as st

from rota import Costs, Curve, FormatError, PlacementError, Size, SizeModel, fit_sizes
from support.sampling import some

SIZES = [Size.padded([length] * rows) for length in (16, 64, 128, 256) for rows in (1, 4)]


def model_of(*forward: Curve, **others: object) -> SizeModel:
    return SizeModel(
        forward_us=forward,
        backward_us=tuple(Curve(*(2 * term for term in curve)) for curve in forward),
        activation_bytes=tuple(Curve(64.0, 512.0, 4.0) for _ in forward),
        boundary_bytes=tuple(Curve(0.0, 128.0, 0.0) for _ in forward[1:]),
        static_bytes=(1000,) * len(forward),
        **others,  # type: ignore[arg-type]
    )


def test_what_was_put_in_comes_out() -> None:
    model = model_of(Curve(300.0, 5.0, 0.02), Curve(0.0, 7.5, 0.0), Curve(1000.0, 0.0, 0.1))
    fit = fit_sizes([(size, model.costs(size)) for size in SIZES])
    assert fit.error < 0.005
    for stage in range(3):
        for size in [*SIZES, Size.padded([100, 90, 40]), Size.padded([500])]:
            assert fit.forward_us[stage].at(size) == pytest.approx(model.forward_us[stage].at(size), rel=0.01)
    assert fit.costs(SIZES[3]).activation_bytes == model.costs(SIZES[3]).activation_bytes
    assert fit.costs(SIZES[3]).boundary_bytes == model.costs(SIZES[3]).boundary_bytes
    assert fit.static_bytes == (1000,) * 3
    assert "fitted to 8 sizes" in fit.note


@settings(max_examples=some(30))
@given(st.integers(0, 10_000))
def test_no_coefficient_is_negative_and_no_measured_byte_is_missed(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [Size.padded([rng.randint(1, 300)] * rng.randint(1, 8)) for _ in range(rng.randint(2, 6))]
    sizes.append(Size(sizes[0].tokens + 1, sizes[0].squares + 1))
    measured = [
        (size, Costs((rng.randint(0, 9999),), (rng.randint(0, 9999),), activation_bytes=(rng.randint(0, 10**6),)))
        for size in sizes
    ]
    fit = fit_sizes(measured)
    for curves in (fit.forward_us, fit.backward_us, fit.activation_bytes):
        assert min(min(curve) for curve in curves) >= 0
    for size, costs in measured:
        assert fit.costs(size).activation_bytes >= costs.activation_bytes
    worst = max(
        (abs(curve.at(size) - us) / us)
        for curves, name in ((fit.forward_us, "forward_us"), (fit.backward_us, "backward_us"))
        for size, costs in measured
        for curve, us in zip(curves, getattr(costs, name), strict=True)
        if us >= 100
    )
    assert fit.error == pytest.approx(worst)


def test_a_noisy_time_is_said() -> None:
    model = model_of(Curve(300.0, 5.0, 0.02))
    noisy = [(size, model.costs(size)) for size in SIZES]
    size, costs = noisy[5]
    noisy[5] = size, Costs((round(costs.forward_us[0] * 1.5),), costs.backward_us, boundary_bytes=0)
    assert 0.2 < fit_sizes(noisy).error < 0.5


def test_refusals() -> None:
    costs = model_of(Curve(1.0), Curve(1.0)).costs(SIZES[0])
    with pytest.raises(PlacementError, match="1 different sizes"):
        fit_sizes([(SIZES[0], costs), (SIZES[0], costs)])
    with pytest.raises(PlacementError, match="other stages, edges or backwards"):
        fit_sizes([(SIZES[0], costs), (SIZES[1], Costs((1,), (2,)))])


def test_json_keeps_a_model() -> None:
    model = fit_sizes([(size, model_of(Curve(3.0, 5.0, 0.02), Curve(2.0)).costs(size)) for size in SIZES])
    assert SizeModel.from_json(model.to_json()) == model
    with pytest.raises(FormatError, match=r"sizes.forward_us\[0\]"):
        SizeModel.from_json('{"rota": "sizes", "forward_us": [["x"]], "backward_us": [[1, 2, 3]]}')
    with pytest.raises(FormatError, match='has the field "forwards"'):
        SizeModel.from_json('{"rota": "sizes", "forwards": [], "backward_us": []}')
    with pytest.raises(FormatError, match="expected a number"):
        SizeModel.from_json('{"rota": "sizes", "forward_us": [[1, 2, true]], "backward_us": [[1, 2, 3]]}')


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
