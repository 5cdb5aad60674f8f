"""Models of transformers by their config alone: made, and given batches of random tokens; without network."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from rota.core import reading
from rota.core.errors import FormatError

PREFIX = "hf:"
_LENGTH = 1024  # of a row in tokens, if nothing else is asked for; fewer where the model takes fewer
#: Fields by which a config brings code, or other weights than PyTorch trains.
_REFUSED = {
    "auto_map": "it names code of its own, which Rota does not run",
    "custom_pipelines": "it names code of its own, which Rota does not run",
    "quantization_config": "its weights are quantized, and quantized weights cannot be trained",
}
_ATTENTION = ("attn_implementation", "_attn_implementation")


def make_model(path: str, config: Any) -> nn.Module:
    """The language model of the config in a file, with random weights of its dtype, in training mode."""
    import transformers

    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM):
        if type(config) in auto._model_mapping:
            how = {"dtype": config.dtype or torch.float32, "trust_remote_code": False}
            model: nn.Module = auto.from_config(config, **how)
            return model.train()
    raise FormatError(
        f"{path}: transformers has no language model for model_type {config.model_type!r}; write a MODEL.py whose "
        f"make_model makes it"
    )


def read_config(spec: str) -> tuple[str, Any]:
    """The file of `hf:config.json`, and its config.

    Raises FormatError if it brings code, or if transformers does not know it.
    """
    path = spec.removeprefix(PREFIX)
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    try:
        fields = reading.load(reading.read_text(path))
    except ValueError as error:
        raise FormatError(f"{path}: is not JSON: {error}") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise FormatError(f"{path}: has no model_type; give the config.json of a transformers model")
    for name, value in _fields(fields):
        if name in _REFUSED and value:
            raise FormatError(f"{path}: has {name}: {_REFUSED[name]}; write a MODEL.py with make_model")
        if name in _ATTENTION and isinstance(value, str) and "/" in value:
            raise FormatError(f"{path}: {name} {value!r} would be downloaded; leave it out, or say 'sdpa'")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        from transformers import AutoConfig
    except ImportError:
        raise FormatError(f"{spec}: this needs transformers; install it with: pip install transformers") from None
    try:
        config = AutoConfig.for_model(**{**fields, "use_cache": False})
    except Exception as error:
        raise FormatError(f"{path}: transformers does not accept it: {type(error).__name__}: {error}") from error
    return path, config


def _fields(fields: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        yield name, value
        if isinstance(value, dict):
            yield from _fields(value)


def batches_of(config: Any, length: int | None, path: str) -> Callable[[int], tuple[Any, Any]]:
    """Makes batches of random tokens for a model with this config: its keyword inputs with labels, and the labels."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(text, "vocab_size", None)
    if not isinstance(vocabulary, int):
        raise FormatError(f"{path}: the model's config has no vocab_size to make tokens from; define make_batch(rows)")
    longest = getattr(text, "max_position_embeddings", None) or _LENGTH
    if length is not None and length > longest:
        raise FormatError(f"--length {length}: the model of {path} takes {longest} tokens at most")
    columns = length or min(_LENGTH, longest)

    def make_batch(rows: int) -> tuple[Any, Any]:
        tokens = torch.randint(vocabulary, (rows, columns))
        return {"input_ids": tokens, "labels": tokens}, tokens

    return make_batch


def own_loss(output: Any, labels: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - the model has had them
    """The loss that the model has made of its labels."""
    loss: torch.Tensor = output.loss
    return loss
