"""verify on unmodified models that were recorded in float32, and compute in float32 inside."""

from __future__ import annotations

import pytest
import torch

from rota import split, verify
from support.hf_models import CASES


@pytest.mark.parametrize("name", ["t5", "qwen3_moe", "resnet"])
def test_models_in_float32_are_compared_in_float64(name: str) -> None:
    case = CASES[name]
    model = case.make_model().float()
    batch = {
        key: value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for key, value in case.make_batch(4, 8, 0).items()
    }
    stages = split(model, 2, case.cuts, example=batch)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    against = "microbatches" if case.mixes_rows else "batch"
    found = verify(stages, batch, case.make_targets(batch), case.loss_fn, against=against)
    assert found.exact, found.to_text()
    assert [each.dtype for each in found.comparisons] == ["float64", "float32"]
    assert found.comparisons[0].largest <= 1e-10
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key])
    again = verify(stages, batch, case.make_targets(batch), case.loss_fn, against=against, fp64=False)
    assert again.exact, again.to_text()


def test_a_loss_of_the_output_alone() -> None:
    case = CASES["gpt2"]
    model = case.make_model()
    batch = dict(case.make_batch(4, 8, 0))
    batch["labels"] = batch["input_ids"]
    stages = split(model, 2, case.cuts, example=batch)
    found = verify(stages, batch, loss_fn=lambda output: output.loss)
    assert found.exact, found.to_text()
    assert found.comparisons[0].largest <= 1e-10
