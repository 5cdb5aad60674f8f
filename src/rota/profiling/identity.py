"""What a profile's figures hold for, as texts that can be compared and named."""

from __future__ import annotations

import hashlib
import inspect
import platform
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from rota.models import Stages
from rota.runtime.messages import describe, flatten
from rota.runtime.precision import ambient_autocast


def identity_of(
    stages: Stages, loss_fn: Callable[..., Any] | None, optimizer: Callable[..., Any] | None
) -> dict[str, str]:
    """By name, what must be the same for a profile to be true: all but the device and the inputs."""
    autocast = ", ".join(f"{kind} {str(dtype)[6:]}" for kind, dtype in ambient_autocast())
    return {
        "model": _structure(stages),
        "source of the model's classes": _sources(stages),
        "loss_fn": _function(loss_fn),
        "optimizer": _function(optimizer),
        "autocast": autocast or "off",
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def inputs_of(batch: Any, target: Any) -> str:
    """Structure, dtypes and shapes of a micro-batch."""
    return f"{describe(flatten(batch, 'the batch')[1])}, target {describe(flatten(target, 'the target')[1])}"


def _structure(stages: Stages) -> str:
    """Modules with their options, and each parameter and buffer by name, shape, dtype and whether it is trained."""
    parts = [f"{module!r} {module.training}" for module in stages.modules]
    for module in stages.modules:
        tensors = (*module.named_parameters(), *module.named_buffers())
        parts += [f"{name} {list(t.shape)} {t.dtype} {t.requires_grad}" for name, t in tensors]
    parts += [f"{edge} {edge.key}" for edge in stages.edges] + [str(stages.inputs)]
    num_parameters = sum(parameter.numel() for parameter in {p for m in stages.modules for p in m.parameters()})
    return f"{len(stages)} layers, {num_parameters:,} parameters, {_digest(parts)}"


def _sources(stages: Stages) -> str:
    """Of all classes but PyTorch's own, whose version says enough; a class without a source counts by its name."""
    classes = {type(inner) for module in stages.modules for inner in module.modules()}
    own = [cls for cls in classes if not cls.__module__.startswith("torch.")]
    return _digest(sorted(_source(cls) for cls in own))


def _source(of: Any) -> str:
    try:
        return f"{of.__qualname__} {inspect.getsource(of)}"
    except (OSError, TypeError):
        return f"{of.__module__}.{of.__qualname__}"


def _function(function: Callable[..., Any] | None) -> str:
    if function is None:
        return "none"
    if isinstance(function, partial):
        return f"{_function(function.func)} {function.args} {function.keywords}"
    if not hasattr(function, "__qualname__"):  # an object that is called, such as nn.CrossEntropyLoss()
        return f"{function!r} {_digest([_source(type(function))])}"
    return f"{function.__qualname__} {_digest([_source(function)])}"


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
