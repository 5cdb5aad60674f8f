"""What a profile of several sizes measures: on a busy machine, and in a given time."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from planning.test_autoplan import LONG_S, UNEVEN, layer_costs
from rota import LayerCosts, Machine, Profile, Stages, autoplan
from rota.profiling import layer_profile
from rota.profiling.devices import OtherPrograms
from support.profiles import profile_model

STAGES = Stages([nn.Linear(2, 2), nn.Linear(2, 2)])


def batch_of(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(rows, 2), torch.ones(rows, 2)


def profiled(monkeypatch: pytest.MonkeyPatch, missing: float, cache: Path | None = None) -> Profile:
    """A profile of one size, while other programs take so many cores."""
    monkeypatch.setattr(OtherPrograms, "missing_cores", lambda *_: missing)
    monkeypatch.setattr(LayerCosts, "mean_spread", 0.01)  # of tiny layers it may be anything
    return profile_model(STAGES, batch_of, [4], nn.functional.mse_loss, cache=cache, repeats=1)


def test_a_disturbed_measurement_is_doubtful(monkeypatch: pytest.MonkeyPatch) -> None:
    assert profiled(monkeypatch, 0.5)[4].why_doubtful == "other programs took 0.5 of the cores"
    assert not profiled(monkeypatch, 0.05)[4].why_doubtful


def test_the_doubt_is_kept_in_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    profile = profiled(monkeypatch, 0.7, tmp_path / "profile.json")
    assert Profile.from_json(profile.to_json()) == profile
    again = profiled(monkeypatch, 0.9, tmp_path / "profile.json")
    assert again[4].missing_cores == profile[4].missing_cores == 0.7
    quiet = layer_costs(1)
    assert "missing_cores" not in quiet.to_json()
    assert LayerCosts.from_json(quiet.to_json()) == quiet


def test_uneven_timings_are_doubtful() -> None:
    costs = replace(layer_costs(1, (10, 30)), spread=(0.5, 0.1))
    assert costs.mean_spread == pytest.approx(0.2)
    assert not costs.why_doubtful
    doubtful = replace(costs, spread=(0.9, 0.1))
    assert doubtful.why_doubtful == "repeated timings of a layer vary by 30% (interquartile range)"


def test_autoplan_says_so() -> None:
    machine, disturbed = Machine(4), replace(layer_costs(1, UNEVEN), missing_cores=0.8)
    more = replace(layer_costs(2, UNEVEN), missing_cores=0.4)
    assert "busy" not in autoplan({1: layer_costs(1, UNEVEN)}, machine, 8, time_limit_s=LONG_S).to_text()
    told = autoplan({1: disturbed, 2: more}, machine, 8, time_limit_s=LONG_S).remarks[0]
    assert told == (
        "layers were measured on a busy or uneven machine: with 1 row per micro-batch, other programs took 0.8 of the "
        "cores; the same goes for 1 other size. Another run may cut the model elsewhere: stop other programs, and "
        "profile again (--refresh)"
    )


SIZES = [8, 1, 4, 2]  # the most important first


@pytest.mark.parametrize(
    ("seconds", "rows"),
    [(15, [1, 8, 4, 2]), (14, [1, 8, 4]), (12, [1, 8]), (9, [1, 8]), (8.5, [1]), (0, [1]), (1e9, [1, 8, 4, 2])],
)
def test_the_most_important_sizes_that_fit(seconds: float, rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row takes a second."""
    now_s, measured = [0.0], list[int]()

    def measure(given: Any, *_: object) -> Any:
        measured.append(len(given.batch))
        now_s[0] += len(given.batch)

    monkeypatch.setattr(layer_profile, "_measured", measure)
    monkeypatch.setattr(layer_profile, "costs_of", lambda stages, layers, names, count, note: layer_costs(count))
    monkeypatch.setattr(layer_profile.time, "monotonic", lambda: now_s[0])  # type: ignore[attr-defined]
    profile = profile_model(STAGES, batch_of, SIZES, nn.functional.mse_loss, within_s=seconds)
    assert (measured, [*profile]) == (rows, sorted(rows))


def test_without_a_limit_all_sizes_are_measured() -> None:
    assert [*profile_model(STAGES, batch_of, SIZES, nn.functional.mse_loss, repeats=1)] == [1, 2, 4, 8]
