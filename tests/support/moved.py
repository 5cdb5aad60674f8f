"""Tests that were written for the CPU, on another device: stages are moved before their pipeline is made."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any
from unittest.mock import patch

import torch

from rota import Pipeline
from rota.runtime.messages import over_tensors


@contextmanager
def pipelines_on(device: torch.device) -> Iterator[None]:
    """Inside, pipelines move their stages to `device`. They move batches by themselves."""
    init = Pipeline.__init__

    def init_there(pipeline: Pipeline, stages: Any, *args: Any, **options: Any) -> None:
        stages.to(device)  # which keeps ties
        init(pipeline, stages, *args, **options)

    with patch.object(Pipeline, "__init__", init_there):
        yield


def on_cpu(value: Any) -> Any:
    """The value with all tensors on the CPU; looks into dataclasses that can be changed, too."""
    if is_dataclass(value) and not value.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        for name, attribute in vars(value).items():
            setattr(value, name, on_cpu(attribute))
        return value
    if isinstance(value, list):
        return [*map(on_cpu, value)]
    if isinstance(value, tuple) and not hasattr(value, "_make"):
        return tuple(map(on_cpu, value))
    if isinstance(value, dict):
        return {key: on_cpu(item) for key, item in value.items()}
    return over_tensors(lambda tensor: tensor.detach().cpu(), value)
