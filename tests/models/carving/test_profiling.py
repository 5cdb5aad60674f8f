"""Layers of unmodified models are profiled, here and for a device that is not here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rota.models import split
from rota.profiling import profile, profile_layers
from support.hf_models import CASES


@pytest.mark.parametrize("device", [None, "h100"])
def test_profile(device: str | None) -> None:
    case = CASES["gpt2"]
    model = case.make_model().float()
    if device:
        model = model.to("meta")
    batch = case.make_batch(2, 8, 0)
    if device:
        del batch["attention_mask"]  # transformers looks at its numbers
        batch = {name: value.to("meta") for name, value in batch.items()}
    targets = case.make_targets(batch)
    costs = profile_layers(model, batch, targets, case.loss_fn, repeats=1, device=device)
    assert costs.cuts == tuple(f"transformer.h.{block}" for block in range(4))


class Keeping(nn.Module):
    """Keeps what it has computed, and with it the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.linear(x)
        return self.last.tanh()


def test_what_an_earlier_forward_has_kept_does_not_matter() -> None:
    model, x = nn.Sequential(Keeping(), Keeping()), torch.ones(2, 4)
    model(x)
    kept, stages, loss_fn = model[0].last, split(model, 2), nn.functional.mse_loss
    assert profile(stages, x, x, loss_fn, repeats=1, here=True).num_stages == 2
    assert len(profile_layers(model, x, x, loss_fn, repeats=1).forward_us) == 2
    assert model[0].last is kept
