"""`deepspeed.initialize`: sets what a PipelineModule needs to train, from DeepSpeed's configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from rota.compat.deepspeed.module import PipelineModule
from rota.core import reading
from rota.core.errors import FormatError

_MICROBATCH_SIZE = "train_micro_batch_size_per_gpu"
_SIZES = ("train_batch_size", _MICROBATCH_SIZE, "gradient_accumulation_steps")
_IGNORED = ("steps_per_print", "wall_clock_breakdown")  # they do not change results


def initialize(
    args: Any = None,
    model: PipelineModule | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    model_parameters: Iterable[nn.Parameter] | None = None,
    lr_scheduler: Any = None,
    config: Mapping[str, Any] | str | None = None,
) -> tuple[PipelineModule, torch.optim.Optimizer | None, None, Any]:
    """Prepare a model for `train_batch` and `eval_batch`.

    Args:
        args: An object whose `deepspeed_config` is used if `config` is None.
        model: The model.
        optimizer: Its optimizer. None: the one that `config` describes, if it does.
        model_parameters: What that optimizer updates. None: all parameters of the model.
        lr_scheduler: Its learning rate scheduler.
        config: A dict, or the name of a JSON file: batch sizes or gradient_accumulation_steps, gradient_clipping, and
            an optimizer of torch.optim by name. Keys that would change the training in another way are refused.

    Returns:
        (the model, its optimizer, None, its scheduler).

    Raises:
        FormatError: If there is no model, or `config` has a wrong value or a key that is not supported.
    """
    if model is None:
        raise FormatError("initialize got no model; give a PipelineModule")
    config = _read(config if config is not None else getattr(args, "deepspeed_config", None))
    for key, value in config.items():
        if key not in (*_SIZES, *_IGNORED, "gradient_clipping", "optimizer") and not _is_off(value):
            raise FormatError(f"config has {key!r}, which is not supported here; leave it out, and do it in torch")
    model.micro_batches = _num_microbatches(config, model.mpu().data_parallel_size)
    model.gradient_clipping = float(config.get("gradient_clipping", 0.0))
    parameters = [*(model.parameters() if model_parameters is None else model_parameters)]
    if optimizer is None and "optimizer" in config and parameters:  # a stage may have no parameters
        optimizer = _optimizer(config["optimizer"], parameters)
    model.optimizer, model.lr_scheduler = optimizer, lr_scheduler
    return model, optimizer, None, lr_scheduler


def _read(config: Mapping[str, Any] | str | None) -> Mapping[str, Any]:
    if not isinstance(config, str):
        return config or {}
    try:
        value: Any = reading.load(reading.read_text(config))
    except FormatError as error:
        raise FormatError(f"config {config!r}: {error}; give a dict or a JSON file") from None
    if not isinstance(value, dict):
        raise FormatError(f"config {config!r} holds a {type(value).__name__}; give a JSON object")
    return value


def _is_off(section: Any) -> bool:
    """Return whether a section is switched off: `{"enabled": false}`, or `{"stage": 0}` of ZeRO."""
    return isinstance(section, Mapping) and (section.get("enabled") is False or section.get("stage") == 0)


def _num_microbatches(config: Mapping[str, Any], num_replicas: int) -> int:
    """Return the micro-batches per step; batch size = micro-batch size x accumulation steps x replicas."""
    batch_size, microbatch_size, steps = (config.get(key) for key in _SIZES)
    if steps is None:
        if batch_size is None or microbatch_size is None:
            return 1
        steps = batch_size // (microbatch_size * num_replicas)
    both = batch_size is not None and microbatch_size is not None
    if steps < 1 or (both and batch_size != microbatch_size * steps * num_replicas):
        raise FormatError(
            f"train_batch_size {batch_size} is not {_MICROBATCH_SIZE} {microbatch_size} x "
            f"gradient_accumulation_steps {steps} x {num_replicas} replicas; leave one out"
        )
    return int(steps)


def _optimizer(section: Mapping[str, Any], parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    kind: Any = getattr(torch.optim, str(section.get("type")), None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise FormatError(f"optimizer type {section.get('type')!r} is not in torch.optim; give one such as 'Adam'")
    return kind(parameters, **section.get("params", {}))
