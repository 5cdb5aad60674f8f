"""`deepspeed.initialize`: what a PipelineModule needs to train, out of DeepSpeed's configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from rota import reading
from rota.compat.deepspeed.module import PipelineModule
from rota.errors import FormatError

_PER_RANK = "train_micro_batch_size_per_gpu"
_SIZES = ("train_batch_size", _PER_RANK, "gradient_accumulation_steps")
_TOLD_ELSEWHERE = ("steps_per_print", "wall_clock_breakdown")  # they change no result


def initialize(
    args: Any = None,
    model: PipelineModule | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    model_parameters: Iterable[nn.Parameter] | None = None,
    lr_scheduler: Any = None,
    config: Mapping[str, Any] | str | None = None,
) -> tuple[PipelineModule, torch.optim.Optimizer | None, None, Any]:
    """(the model, its optimizer, None, its scheduler): ready for `train_batch` and `eval_batch`.

    `config`, or the file of that name (also `args.deepspeed_config`): batch sizes or gradient_accumulation_steps,
    gradient_clipping, and an optimizer by the name that torch.optim gives it, where none is passed. A key that would
    change the training in another way is refused. Raises FormatError.
    """
    if model is None:
        raise FormatError("initialize got no model; give a PipelineModule")
    config = _read(config if config is not None else getattr(args, "deepspeed_config", None))
    for key, value in config.items():
        if key not in (*_SIZES, *_TOLD_ELSEWHERE, "gradient_clipping", "optimizer") and not _is_off(value):
            raise FormatError(f"config has {key!r}, which is not supported here; leave it out, and do it in torch")
    model.micro_batches = _num_microbatches(config, model.mpu().data_parallel_size)
    model.gradient_clipping = float(config.get("gradient_clipping", 0.0))
    parameters = [*(model.parameters() if model_parameters is None else model_parameters)]
    if optimizer is None and "optimizer" in config and parameters:  # a stage may have none
        optimizer = _optimizer(config["optimizer"], parameters)
    model.optimizer, model.lr_scheduler = optimizer, lr_scheduler
    return model, optimizer, None, lr_scheduler


def _read(config: Mapping[str, Any] | str | None) -> Mapping[str, Any]:
    if not isinstance(config, str):
        return config or {}
    text = reading.read_text(config)
    try:
        read: Any = reading.load(text)
    except FormatError as error:
        raise FormatError(f"config {config!r} cannot be read: {error}; give a dict or a JSON file") from None
    if not isinstance(read, dict):
        raise FormatError(f"config {config!r} holds a {type(read).__name__}; give a JSON object")
    return read


def _is_off(section: Any) -> bool:
    """`"fp16": {"enabled": false}`, `"zero_optimization": {"stage": 0}`."""
    return isinstance(section, Mapping) and (section.get("enabled") is False or section.get("stage") == 0)


def _num_microbatches(config: Mapping[str, Any], num_replicas: int) -> int:
    """How many a step: batch size = its own x accumulation steps x replicas, where two give the third."""
    whole, each, steps = (config.get(key) for key in _SIZES)
    if steps is None:
        if whole is None or each is None:
            return 1
        steps = whole // (each * num_replicas)
    if steps < 1 or (whole is not None and each is not None and whole != each * steps * num_replicas):
        raise FormatError(
            f"train_batch_size {whole} is not {_PER_RANK} {each} x gradient_accumulation_steps {steps} "
            f"x {num_replicas} replicas; leave one out"
        )
    return int(steps)


def _optimizer(described: Mapping[str, Any], parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    named = getattr(torch.optim, str(described.get("type")), None)
    if not (isinstance(named, type) and issubclass(named, torch.optim.Optimizer)):
        raise FormatError(f"optimizer type {described.get('type')!r} is none of torch.optim, such as 'Adam'")
    made: torch.optim.Optimizer = named(parameters, **described.get("params", {}))
    return made
