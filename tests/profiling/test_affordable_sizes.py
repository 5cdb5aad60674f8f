"""Which micro-batch sizes are measured in a given time, and what the others are taken to cost."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import nn

from planning.test_autoplan import layer_costs
from rota.layers import LayerCosts
from rota.models import Stages
from rota.profiling import affordable_sizes, layer_profile
from rota.profiling.affordable_sizes import affordable
from rota.profiling.interpolation import interpolated
from rota.profiling.layer_profile import profile_model

STAGES = Stages([nn.Linear(2, 2), nn.Linear(2, 2)])


def batch_of(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(rows, 2), torch.ones(rows, 2)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each row of a forward takes a second; the rows that were timed."""
    timed: list[int] = []

    def quickest_s(_: Stages, batch: torch.Tensor) -> float:
        timed.append(len(batch))
        return float(len(batch))

    monkeypatch.setattr(affordable_sizes, "_quickest_s", quickest_s)
    return timed


@pytest.mark.parametrize(
    ("seconds", "rows", "repeats"),
    [
        (10_000, (8, 1, 4, 2), 7),  # 78 s per row with 7 repeats, 54 s with 3
        (1100, (8, 1, 4, 2), 3),
        (811, (8, 1, 4, 2), 3),
        (810, (8, 1, 4), 3),
        (600, (8, 1), 3),
        (486, (8,), 3),
        (300, (1, 4), 3),  # 8 rows do not fit
        (2, (1,), 3),
    ],
)
def test_the_most_important_sizes_that_fit(
    seconds: float, rows: tuple[int, ...], repeats: int, forwards: list[int]
) -> None:
    assert affordable(STAGES, batch_of, [8, 1, 4, 2], 7, seconds) == (rows, repeats)


def test_a_size_far_too_slow_is_not_run_to_know_that(forwards: list[int]) -> None:
    assert affordable(STAGES, batch_of, [8, 1, 4, 2], 7, 60.0).rows == (1,)
    assert forwards == [1, 2]


def test_timing_leaves_modules_and_random_numbers_as_they_were() -> None:
    norm = nn.BatchNorm1d(2)
    state = torch.get_rng_state()
    affordable(Stages([norm, nn.Dropout()]), batch_of, [4, 2], 3, 10.0)
    assert torch.equal(state, torch.get_rng_state())
    assert norm.running_mean is not None
    assert not norm.running_mean.any()


def test_a_layer_that_fails_is_named_where_it_is_measured() -> None:
    assert affordable(Stages([nn.Linear(3, 2)]), batch_of, [4, 2], 3, 10.0).rows == (4, 2)


def test_between_two_sizes_each_figure_is_on_a_line() -> None:
    def costs(rows: int) -> LayerCosts:
        made = layer_costs(rows, (10, 20, 30), parameters=8, boundary=4)
        return replace(made, shared=((0, 2, 5 * rows),), tied=((0, 1, 7),), spread=(rows / 100,) * 3, note="measured")

    between = interpolated(costs(2), costs(8), 4)
    assert between is not None
    assert between.is_interpolated
    assert between.note == "interpolated between 2 and 8 rows, measured"
    assert between.spread == (0.08,) * 3
    expected = replace(costs(4), note=between.note, spread=between.spread)
    assert {f.name: getattr(between, f.name) for f in fields(LayerCosts)} == {
        f.name: getattr(expected, f.name) for f in fields(LayerCosts)
    }
    assert interpolated(costs(2), replace(costs(8), shared=()), 4) is None
    assert not costs(2).is_interpolated


def test_a_profile_has_what_is_between_and_leaves_out_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def two(stages: Stages, make_batch: Any, rows: list[int], repeats: int, seconds: float) -> Any:
        assert rows == [4, 1, 8, 2]  # the most important first
        return affordable_sizes.Affordable((4, 1), 1)

    monkeypatch.setattr(layer_profile, "affordable", two)
    given = STAGES, batch_of, [4, 1, 8, 2], nn.functional.mse_loss
    profile = profile_model(*given, within_s=60.0)
    assert [*profile] == [1, 2, 4]
    assert [costs.is_interpolated for costs in profile.values()] == [False, True, False]
    assert [*profile_model(*given, repeats=1)] == [1, 2, 4, 8]


def test_no_more_sizes_are_begun_where_the_first_took_far_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_profile, "affordable", lambda *_: affordable_sizes.Affordable((4, 1), 1))
    profile = profile_model(STAGES, batch_of, [4, 1, 2], nn.functional.mse_loss, within_s=1e-6)
    assert [*profile] == [4]
