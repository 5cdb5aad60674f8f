"""verify on unmodified models, and on those that cannot run in float64 or keep tensors of an earlier forward."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rota import PipelineError, split, verify
from support.hf_models import CASES
from verifying.test_verify import WIDTH, by_hand, sequential


class Narrow(nn.Module):
    """Refuses float64, as kernels do that were not written for it."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float64:
            raise RuntimeError("expected a narrow matrix,\n got Double")
        return x.tanh()


def test_a_model_that_cannot_run_in_float64_is_compared_in_its_own_dtype() -> None:
    model, x = sequential(Narrow())
    found = verify(split(model, 2), x, torch.zeros(8, 4), functional.mse_loss)
    assert found.exact, found.to_text()
    assert [each.dtype for each in found.comparisons] == ["float32"]
    (note,) = found.notes
    assert note.startswith("compared in the model's own dtype only: the unsplit model in float64 fails, ")
    assert "RuntimeError: expected a narrow matrix, got Double" in note
    assert f"note: {note}" in found.to_text()
    assert json.loads(json.dumps(found.to_fields()))["notes"] == [note]


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError(f"in {x.dtype}")


def test_a_model_that_fails_in_its_own_dtype_too_raises() -> None:
    model, x = sequential()
    with pytest.raises(PipelineError, match=r"ZeroDivisionError: in torch\.float32"):
        verify(by_hand(nn.Sequential(*model, Failing()), *model), x, torch.zeros(8, 4), functional.mse_loss)


class Keeping(nn.Module):
    """Keeps what it has computed, and with it the graph: directly, and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.last: Tensor | None = None
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.linear(x)
        self.seen = [self.last.square()]
        return self.last.tanh()


def test_what_an_earlier_forward_has_kept_does_not_matter() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Keeping(), Keeping()), torch.randn(4, WIDTH)
    model(x)
    found = verify(split(model, 2), x, x, functional.mse_loss)
    assert found.exact, found.to_text()


class NotCopied(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise PipelineError("this layer is not to be copied")


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
