"""Which micro-batch sizes are measured in a given time: the smallest first, then the others as long as they fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from planning.test_autoplan import layer_costs
from rota.models import Stages
from rota.profiling import layer_profile
from support.profiles import profile_model

STAGES = Stages([nn.Linear(2, 2), nn.Linear(2, 2)])
SIZES = [8, 1, 4, 2]  # the most important first


def batch_of(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(rows, 2), torch.ones(rows, 2)


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
