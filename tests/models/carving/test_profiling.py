"""Layers of unmodified models are profiled, here and for a device that is not here."""

from __future__ import annotations

import pytest

from rota.profiling import profile_layers
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
