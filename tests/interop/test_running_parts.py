"""A model runs in torchtitan's parts, or is refused with the module that a part lacks."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rota import CutPoint, PipelineError, SplitError, split
from rota.interop import check_parts, module_parts, parts_beginning_with
from support.plain_gpt import GPT, batch_of

PARTS = (("embed", "layers.0"), ("layers.1", "layers.2"), ("norm", "head"))
TOKENS = torch.tensor([[1, 2, 3]])


def skipping(model: nn.Module, x: Tensor) -> Tensor:
    x = model.embed(x) if model.embed is not None else x
    for layer in model.layers.children():
        x = layer(x)
    x = model.norm(x) if model.norm is not None else x
    return model.head(x) if model.head is not None else x


def reading_a_weight(model: nn.Module, x: Tensor) -> Tensor:
    return skipping(model, x) * model.head.weight.numel()


def skipping_ends(model: nn.Module, x: Tensor) -> Tensor:
    x = model.norm(x) if model.norm is not None else x
    return model.head(x) if model.head is not None else x


def shifting_everywhere(model: nn.Module, x: Tensor) -> Tensor:
    """Adds positions in every stage."""
    x = model.embed(x) if model.embed is not None else x
    x = x + torch.arange(4.0, device=x.device)
    for layer in model.layers.children():
        x = layer(x)
    return skipping_ends(model, x)


def adding_up(model: nn.Module, x: Tensor) -> Tensor:
    """Adds up over the sequence in every stage."""
    x = skipping(model, x)
    return x.sum(0)


class Model(nn.Module):
    """Tokens -> logits, with the forward of a test."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor], as_list: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, 4)
        layers = [nn.Linear(4, 4) for _ in range(3)]
        self.layers = nn.ModuleList(layers) if as_list else nn.ModuleDict({str(i): m for i, m in enumerate(layers)})
        self.norm, self.head = nn.LayerNorm(4), nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 10))
        self.head.weight = nn.Parameter(torch.ones(1))
        self.run = run

    def forward(self, tokens: Tensor) -> Tensor:
        return self.run(self, tokens)


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_forward_that_skips_what_is_gone(device: str, as_list: bool) -> None:
    model = Model(skipping, as_list).to(device)
    check_parts(model, PARTS, TOKENS.to(device))
    check_parts(model, PARTS, (TOKENS.to(device),))
    check_parts(model, PARTS, {"tokens": TOKENS.to(device)})
    assert all(module.training for module in model.modules())
    assert sum(1 for _ in model.modules()) == 10  # nothing of it is gone


def test_torchtitan_s_own_way() -> None:
    words = batch_of(2)[0]
    check_parts(GPT(), parts_beginning_with(GPT(), ["layers.1", "layers.3", "norm"]), words)
    marked = GPT(marks={str(block): CutPoint() for block in (0, 2, 4)})
    check_parts(marked, module_parts(marked, split(marked, 4, example=words)), words)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("run", "told"),
    [
        (reading_a_weight, r"stage 0 .* 'NoneType' object has no attribute 'weight' in \"return .* must pass over"),
        (adding_up, r"return float32 \[\], but the whole model float32 \[3, 10\]: put what every stage would repeat"),
    ],
)
def test_a_forward_that_needs_what_is_gone(run: Callable[[nn.Module, Tensor], Tensor], told: str, device: str) -> None:
    with pytest.raises(SplitError, match=told):
        check_parts(Model(run).to(device), PARTS, TOKENS.to(device))


def test_what_every_stage_repeats_is_found_by_its_numbers() -> None:
    with pytest.raises(SplitError, match="do not compute what the whole model computes: put what every stage would"):
        check_parts(Model(shifting_everywhere), PARTS, TOKENS)


def test_a_batch_on_which_the_whole_model_fails() -> None:
    with pytest.raises(PipelineError, match=r"the whole model does not run on this batch: .*Error"):
        check_parts(Model(skipping), PARTS, TOKENS.double())
    with pytest.raises(SplitError, match="'norm' of Model is in none of the plan's parts"):
        check_parts(Model(skipping), (PARTS[0], PARTS[1], ("head",)), TOKENS)
