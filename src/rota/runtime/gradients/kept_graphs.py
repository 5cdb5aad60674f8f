"""Graphs that several micro-batches share: autograd frees one in the first backward, and refuses the second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rota.core.errors import PipelineError
from rota.models import Stages
from rota.runtime.messages import tensors_in


@contextmanager
def explaining_shared_graphs(stages: Stages, stage: int, batch: Any) -> Iterator[None]:
    """Raises PipelineError with the tensor whose graph a backward goes through for the second time, and the remedy."""
    try:
        yield
    except RuntimeError as error:
        if "backward through the graph a second time" in str(error) and (why := _why(stages, stage, batch)):
            raise PipelineError(f"{why} ({str(error).partition('.')[0]})") from error
        raise


def _why(stages: Stages, stage: int, batch: Any) -> str:
    named = zip(stages.inputs[stage], stages.pick_inputs(stage, batch), strict=True)
    for name, value in named:
        if any(tensor.grad_fn is not None for tensor in tensors_in(value)):
            return (
                f"input {name!r}, which stage {stage} reads, carries the graph that made it, and the backward of each "
                "micro-batch goes through it: give step the detached tensor, or let the first stage compute it"
            )
    for path, module in stages[stage].named_modules():
        for name, tensor in _kept_by(module):
            if tensor.grad_fn is not None:
                return (
                    f"{f'{path}.' if path else ''}{name} of stage {stage} keeps a tensor with its graph from one "
                    "micro-batch to the next, and the backward of each goes through it: keep tensor.detach()"
                )
    return ""


def _kept_by(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers and plain attributes, also in lists, tuples and dicts."""
    for held in (module._buffers, vars(module)):
        for name, value in held.items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from ((name, tensor) for tensor in tensors_in(value))
