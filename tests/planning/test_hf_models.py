"""Language models of transformers by their config: what is made of it, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import rota
from rota import FormatError
from rota.planning.model_file import load_model_file, profile_file
from rota.planning.request import Measuring

GPT2 = {"model_type": "gpt2", "n_layer": 3, "n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 32}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
}


def written(folder: Path, config: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return f"hf:{path}"


def test_a_config_is_profiled_cut_and_verified(tmp_path: Path) -> None:
    file = load_model_file(written(tmp_path, GPT2), length=8)
    inputs, labels = file.made_batch(4)
    assert inputs["input_ids"].shape == (4, 8)
    assert int(labels.max()) < 50
    profile = profile_file(file, [2], Measuring(repeats=1, cuts=["transformer.h.*"]))
    assert profile[2].cuts == ("transformer.h.0", "transformer.h.1", "transformer.h.2")
    assert profile[2].tied  # the embedding is the head
    model = file.made_model()
    stages = rota.split(model, 2, ["transformer.h.1"], example=inputs)
    found = rota.verify(stages, inputs, labels, file.loss_fn)
    assert found.exact, found.to_text()


def test_an_estimate_holds_no_weights_and_knows_flash_attention(tmp_path: Path) -> None:
    file = load_model_file(written(tmp_path, LLAMA), length=64)
    layers = profile_file(file, [2], Measuring("h100"))[2]
    assert layers.num_layers == 4
    assert {layers.parameter_bytes[i] for i in (1, 2)} == {
        2 * (256 * (256 + 128 + 128 + 256) + 3 * 256 * 512 + 2 * 256)
    }
    assert layers.forward_us[1] == layers.forward_us[2]
    attention_bytes = 2 * 4 * 64 * 64 * 2  # of a matrix of weights, which flash attention does not keep
    linear_bytes = 2 * 64 * 2 * (256 * 12 + 512 * 6)
    assert layers.kept_bytes[1] < linear_bytes + attention_bytes


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**GPT2, "auto_map": {"AutoModelForCausalLM": "modeling.Evil"}}, "names code of its own"),
        ({**GPT2, "attn_implementation": "kernels-community/flash-attn"}, "would be downloaded"),
        ({**GPT2, "quantization_config": {"bits": 4}}, "its weights are quantized"),
        ({"model_type": "nonsense"}, "transformers does not accept it"),
        ([], "has no model_type"),
    ],
)
def test_what_is_refused(tmp_path: Path, config: Any, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        load_model_file(written(tmp_path, config))


def test_lengths_and_models_that_are_no_language_models(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="takes 32 tokens at most"):
        load_model_file(written(tmp_path, GPT2), length=33)
    vision = load_model_file(written(tmp_path, {"model_type": "bert", "vocab_size": 30}))
    assert vision.made_batch(1)[0]["input_ids"].shape == (1, 512)
    with pytest.raises(FormatError, match="has no vocab_size"):
        load_model_file(written(tmp_path, {"model_type": "vit"}))


FILE = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel

def make_model():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=50, n_positions=32))
"""


def test_a_file_with_a_model_of_transformers_needs_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(FILE)
    file = load_model_file(str(path), length=8)
    inputs, labels = file.made_batch(2)
    assert inputs["labels"] is labels
    model = file.made_model()
    assert isinstance(model, torch.nn.Module)
    assert torch.equal(file.loss_fn(model(**inputs), labels), model(**inputs).loss) or model.training
    assert profile_file(file, [2], Measuring(repeats=1))[2].num_layers == 4
