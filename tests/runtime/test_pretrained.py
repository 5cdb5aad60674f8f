"""Pretrained safetensors folders load into the stages of one process, or are refused with what does not fit."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

import rota
from rota import FormatError, Stages
from rota.runtime import pretrained
from support.hf_models import decoder, gpt2

llama = partial(decoder, "Llama")
olmoe = partial(decoder, "Olmoe", num_experts_per_tok=2)


def to_load(make: Any) -> Stages:
    """Two stages without memory."""
    with rota.meta_init():
        model = make()
    return rota.split(model, 2, example={"input_ids": torch.ones(2, 4, dtype=torch.long)})


def reads_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that will be read."""
    names: list[str] = []
    read = pretrained._read

    def counted(tensor: torch.Tensor, sources: list[Any]) -> None:
        names.extend(source.name for source in sources)
        read(tensor, sources)

    monkeypatch.setattr(pretrained, "_read", counted)
    return names


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True}])
def test_only_local_weights_are_read(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(**options)
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    stages, names = to_load(lambda: llama(**options)), reads_of(monkeypatch)
    rota.load_pretrained(stages, [1], tmp_path)
    mine = dict(stages[1].named_parameters())
    assert len(names) == len(mine)
    assert not any("layers.0." in name or "layers.1." in name for name in names)
    whole = dict(model.named_parameters(remove_duplicate=False))
    assert all(torch.equal(parameter, whole[name]) for name, parameter in mine.items())
    assert torch.equal(stages[1].get_buffer("model.rotary_emb.inv_freq"), model.model.rotary_emb.inv_freq)
    assert stages[0].get_parameter("model.layers.0.mlp.up_proj.weight").is_meta


def test_a_bare_model_loads_into_one_with_a_head(tmp_path: Path) -> None:
    model = gpt2()
    model.transformer.save_pretrained(tmp_path)
    stages = to_load(gpt2)
    rota.load_pretrained(stages, [0, 1], tmp_path)
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in stages[0].named_parameters())
    assert torch.equal(stages[1].get_parameter("lm_head.weight"), model.lm_head.weight)


def test_dtypes_are_converted_if_asked(tmp_path: Path) -> None:
    model = llama().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    with pytest.raises(FormatError, match=r"is torch.bfloat16, in the model torch.float32.* convert them by"):
        rota.load_pretrained(to_load(llama), [0], tmp_path)
    stages = to_load(llama)
    rota.load_pretrained(stages, [0], tmp_path, cast=True)
    for name, parameter in stages[0].named_parameters():
        assert torch.equal(parameter, model.get_parameter(name).float())


def test_names_and_shapes_that_differ_are_listed(tmp_path: Path) -> None:
    llama(num_blocks=5).save_pretrained(tmp_path / "deeper")
    with pytest.raises(FormatError, match=r"has also model.layers.4.input_layernorm.weight, .* and 1 more"):
        rota.load_pretrained(to_load(llama), [0], tmp_path / "deeper")
    rota.load_pretrained(to_load(llama), [0], tmp_path / "deeper", may_differ=["model.layers.4.*"])
    llama().model.save_pretrained(tmp_path / "bare")
    with pytest.raises(FormatError, match=r"it lacks lm_head.weight"):
        rota.load_pretrained(to_load(llama), [1], tmp_path / "bare")
    stages = to_load(llama)

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)

    rota.load_pretrained(stages, [1], tmp_path / "bare", may_differ="lm_head.*", init=init)
    assert (stages[1].get_parameter("lm_head.weight") == 1).all()
    llama(intermediate_size=32).save_pretrained(tmp_path / "wider")
    with pytest.raises(FormatError, match=r"gate_proj.weight is \[32, 16\], in the model \[24, 16\]"):
        rota.load_pretrained(to_load(llama), [0], tmp_path / "wider")


VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def llava() -> nn.Module:
    vision = CLIPVisionConfig(**VISION, image_size=8, patch_size=4)
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=llama().config, image_token_index=60)
    )


RENAMED = {"llava": llava, "olmoe": partial(olmoe, num_experts=3)}


@pytest.mark.parametrize("kind", RENAMED)
def test_weights_that_transformers_renames_or_fuses_as_it_loads(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = RENAMED[kind]()
    model.save_pretrained(tmp_path, max_shard_size="16KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert not index.keys() >= model.state_dict().keys()  # or nothing would be tested
    same = type(model).from_pretrained(tmp_path)
    with rota.meta_init():
        loaded = RENAMED[kind]()
    rota.load_pretrained(Stages([loaded]), [0], tmp_path)
    torch.testing.assert_close(dict(loaded.state_dict()), dict(same.state_dict()), rtol=0, atol=0)


def test_only_local_experts_are_read_and_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = RENAMED["olmoe"]()
    model.save_pretrained(tmp_path)
    stages, names = to_load(RENAMED["olmoe"]), reads_of(monkeypatch)
    rota.load_pretrained(stages, [1], tmp_path)
    mine = dict(stages[1].named_parameters())
    assert sum("gate_up_proj" in name for name in names) == 2
    assert not any("layers.0." in name or "layers.1." in name for name in names)
    assert all(torch.equal(parameter, model.get_parameter(name)) for name, parameter in mine.items())
    assert stages[0].get_parameter("model.layers.0.mlp.experts.gate_up_proj").is_meta


def test_experts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    olmoe(num_experts=2).save_pretrained(tmp_path)
    with pytest.raises(FormatError, match=r"gate_up_proj is \[2, 48, 16\], in the model \[3, 48, 16\]"):
        rota.load_pretrained(to_load(RENAMED["olmoe"]), [0], tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["model.layers.1.mlp.experts.1.up_proj.weight"] = torch.zeros(3, 3)
    safetensors.torch.save_file(tensors, file)
    with pytest.raises(FormatError, match=r"make model.layers.1.mlp.experts.gate_up_proj of .*RuntimeError: stack"):
        rota.load_pretrained(to_load(RENAMED["olmoe"]), [0], tmp_path)


def test_a_text_is_one_pattern(tmp_path: Path) -> None:
    """Not many, of one letter each: the `*` among them would let the folder lack everything."""
    llama().model.save_pretrained(tmp_path)
    with pytest.raises(FormatError, match=r"it lacks lm_head.weight"):
        rota.load_pretrained(to_load(llama), [1], tmp_path, may_differ="score.*")
    llama(num_blocks=5).save_pretrained(tmp_path)
    rota.load_pretrained(to_load(llama), [0], tmp_path, may_differ="model.layers.4.*")


def refused(folder: Path) -> str:
    with pytest.raises(FormatError) as error:
        rota.load_pretrained(Stages([nn.Linear(2, 2)]), [0], folder)
    return str(error.value)


def test_folders_that_cannot_be_trusted_or_read(tmp_path: Path) -> None:
    assert "is not a folder" in refused(tmp_path / "none")
    assert "has neither model.safetensors nor" in refused(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    assert "has pytorch_model.bin, a pickle, which could run code" in refused(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    assert "cannot read" in refused(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for file in ("../model.safetensors", "/etc/passwd", "model.bin", 3):
        index.write_text(json.dumps({"weight_map": {"weight": file}}))
        assert "index.weight_map" in refused(tmp_path)
    safetensors.torch.save_file({"bias": torch.ones(2)}, tmp_path / "model.safetensors")
    index.write_text(json.dumps({"weight_map": {"weight": "model.safetensors"}}))
    assert "lacks weight, which model.safetensors.index.json says is there" in refused(tmp_path)


def test_names_of_one_tied_weight_must_agree(tmp_path: Path) -> None:
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    state = {name: value.clone() for name, value in tied.state_dict().items()}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    rota.load_pretrained(Stages([tied]), [0], tmp_path)
    state["1.weight"] += 1
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=r"1.weight has other values than 0.weight"):
        rota.load_pretrained(Stages([tied]), [0], tmp_path)
