"""verify on models whose float64 copy cannot run, and on models in which an earlier forward has left tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rota import PipelineError, Verification, split, verify
from support.hf_models import CASES
from verifying.test_verify import WIDTH, sequential


class Narrow(nn.Module):
    """Refuses float64, as kernels do that were not written for it."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float64:
            raise RuntimeError("expected a narrow matrix,\n got Double")
        return x.tanh()


def test_a_model_that_cannot_run_in_float64_is_compared_in_its_own_dtype() -> None:
    model, x = sequential(Narrow())
    found = verify(split(model, 2), model, x, torch.zeros(8, 4), functional.mse_loss)
    assert found.exact, found.to_text()
    assert [each.dtype for each in found.comparisons] == ["float32"]
    (note,) = found.notes
    assert note.startswith("compared in the model's own dtype only: the unsplit model in float64 fails, ")
    assert "RuntimeError: expected a narrow matrix, got Double" in note
    assert f"note: {note}" in found.to_text()
    assert json.loads(json.dumps(found.to_fields()))["notes"] == [note]


def test_differences_are_found_in_the_own_dtype_too() -> None:
    model, x = sequential(Narrow(), nn.BatchNorm1d(WIDTH))
    found = verify(split(model, 2), model, x, torch.zeros(8, 4), functional.mse_loss)
    assert not found.exact
    assert found.reasons[0].startswith("BatchNorm1d '2' takes its statistics over the rows of a micro-batch")
    assert "got Double" in found.notes[0]


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError(f"in {x.dtype}")


def test_a_model_that_fails_in_its_own_dtype_too_raises() -> None:
    model, x = sequential()
    with pytest.raises(ZeroDivisionError, match=r"in torch\.float32"):
        verify(split(model, 2), nn.Sequential(*model, Failing()), x, torch.zeros(8, 4), functional.mse_loss)


def experts_with_grouped_products() -> nn.Module:
    """transformers' default experts, whose `grouped_mm` has no float64 on CPUs."""
    model = CASES["qwen3_moe"].make_model()
    model.config._experts_implementation = "grouped_mm"
    return model.float()


def nllb_moe() -> nn.Module:
    """Its routers convert their own weights to float32 in each forward."""
    from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "d_model": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "max_position_embeddings": 32}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    experts = {"num_experts": 2, "expert_capacity": 8, "encoder_sparse_step": 2, "decoder_sparse_step": 2}
    without = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "moe_token_dropout"), 0.0)
    without |= dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop"), 0.0)
    config = NllbMoeConfig(**sizes, **layers, **experts, **without, use_cache=False)
    return NllbMoeForConditionalGeneration(config)


def logits_loss(output: Any, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    ("make", "dtypes"), [(experts_with_grouped_products, ["float32"]), (nllb_moe, ["float64", "float32"])]
)
def test_mixtures_of_experts(make: Callable[[], nn.Module], dtypes: list[str]) -> None:
    model = make()
    tokens = torch.randint(3, 61, (4, 6), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens} | ({} if make is experts_with_grouped_products else {"decoder_input_ids": tokens})
    stages = split(model, 2, example=batch)
    found = verify(stages, model, batch, tokens, logits_loss, against="microbatches")
    assert found.exact, found.to_text()
    assert [each.dtype for each in found.comparisons] == dtypes
    assert ["float64 fails, RuntimeError: " in note for note in found.notes] == [True] * (2 - len(dtypes))


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


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Keeping(), Keeping()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_what_an_earlier_forward_has_kept_does_not_matter() -> None:
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(4, WIDTH)
    model(x)
    kept = model.layers[0].last
    found = verify(split(model, 2, example=x), model, x, x, functional.mse_loss)
    assert found.exact, found.to_text()
    assert model.layers[0].last is kept


class NotCopied(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise PipelineError("this layer is not to be copied")


def test_fields_survive_json() -> None:
    found = Verification((), None, (), ("a note",))
    assert Verification.from_fields(json.loads(json.dumps(found.to_fields()))) == found
