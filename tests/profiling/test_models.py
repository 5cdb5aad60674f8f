"""Profiling runs stages of all sorts, also real models' blocks, and a storage watch changes none of their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rota import Stages
from rota.profiling.peak_memory import StorageWatch
from rota.runtime.gradients.forward_backward import backward_inputs, forward
from support.odd_stages import ROWS, STAGES, WIDTH, Calls
from support.profiles import profile, profile_layers

LENGTH, HIDDEN = 5, 8


def sum_of(output: Any, target: Any) -> Tensor:
    del target
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first.sum()


# What torch.compile made is not run under a dispatch mode; a stage may differentiate within unless it is recomputed.
WATCHED = [name for name in STAGES if "compiled" not in name]


@pytest.mark.parametrize("name", WATCHED)
def test_stages_of_all_sorts(name: str) -> None:
    torch.manual_seed(3)
    stages = Stages([nn.Linear(WIDTH, WIDTH).double(), STAGES[name]().double()])
    batch = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    in_place = name.startswith("in place at once")  # a recomputed stage must not write into what it receives
    differentiates = name == "gradient of its own"
    for recompute in ((),) if in_place or differentiates else ((), (1,)):
        costs = profile(stages, batch, None, sum_of, split_backward=True, recompute=recompute, repeats=1, here=True)
        assert costs.num_stages == 2
    assert profile_layers(stages, batch, None, sum_of, repeats=1).num_layers == 2


# --- real models ------------------------------------------------------------------------------------------------------


def gpt2(transformers: Any) -> tuple[list[nn.Module], Tensor]:
    config = transformers.GPT2Config(vocab_size=11, n_positions=LENGTH, n_embd=HIDDEN, n_layer=2, n_head=2)
    model = transformers.GPT2Model(config)
    embed = Calls(lambda s, x: s.tokens(x) + s.positions(torch.arange(LENGTH)), tokens=model.wte, positions=model.wpe)
    return [embed, *model.h, model.ln_f], torch.randint(11, (2, LENGTH))


def t5(transformers: Any) -> tuple[list[nn.Module], Tensor]:
    sizes = {"d_model": HIDDEN, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    model = transformers.T5EncoderModel(transformers.T5Config(vocab_size=11, **sizes, use_cache=False))
    blocks = [Calls(lambda s, x: s.block(x)[0], block=block) for block in model.encoder.block]
    return [model.shared, *blocks, model.encoder.final_layer_norm], torch.randint(11, (2, LENGTH))


def vit(transformers: Any) -> tuple[list[nn.Module], Tensor]:
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=4, patch_size=2))
    return [model.embeddings, *model.layers, model.layernorm], torch.randn(2, 3, 4, 4, dtype=torch.float64)


@pytest.mark.parametrize("make", [gpt2, t5, vit])
def test_transformers(make: Callable[[Any], tuple[list[nn.Module], Tensor]]) -> None:
    torch.manual_seed(3)
    modules, batch = make(pytest.importorskip("transformers"))
    stages = Stages([module.double() for module in modules])
    costs = profile(stages, batch, None, sum_of, split_backward=True, repeats=1, here=True)
    assert costs.weight_us is not None
    assert profile_layers(stages, batch, None, sum_of, repeats=1).num_layers == len(stages)


def test_a_storage_watch_changes_no_gradient() -> None:
    torch.manual_seed(3)
    module = STAGES["numbers"]().double()
    x, gradient = torch.randn(2, ROWS, WIDTH, dtype=torch.float64).unbind()
    x.requires_grad_()
    module(x).backward(gradient)
    expected = [x.grad, *(parameter.grad for parameter in module.parameters())]
    module.zero_grad(set_to_none=True)
    with StorageWatch():
        _, _, kept = forward(Stages([nn.Identity(), module, nn.Identity()]), 1, [x], None, split=True)
        (of_inputs,), work = backward_inputs(kept, [[gradient]])
        work.run()
    found = [*of_inputs, *(parameter.grad for parameter in module.parameters())]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
