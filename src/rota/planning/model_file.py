"""MODEL.py: how a user's model, batches, loss and optimizer reach `rota profile` and `rota autoplan`."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, final

import torch
from torch import nn

from rota.errors import FormatError
from rota.profiles import Profile
from rota.profiling import profile_model
from rota.profiling.optimizers import MakeOptimizer
from rota.profiling.rounds import LossFn
from rota.runtime.messages import over_tensors

_REAL = ("cpu", "cuda")  # devices that compute

EXAMPLE = """\
    def make_model():
        return GPT()                                   # with CutPoints, or an nn.Sequential

    def make_batch(rows):
        return inputs, targets                         # one micro-batch of that many rows

    def loss_fn(output, target):
        return nn.functional.cross_entropy(output, target)

    def make_optimizer(parameters):                    # optional
        return torch.optim.AdamW(parameters)"""


@final
@dataclass(frozen=True, slots=True)
class ModelFile:
    """What a MODEL.py defines."""

    path: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int], tuple[Any, Any]]
    loss_fn: LossFn
    make_optimizer: MakeOptimizer | None = None


def load_model_file(path: str) -> ModelFile:
    """Run the file, as `python path` would but under another name. Raises FormatError for what it lacks."""
    module = _module(path)
    for name in ("make_model", "make_batch", "loss_fn"):
        if not callable(getattr(module, name, None)):
            raise FormatError(f"{path} defines no function {name}; it needs such as:\n{EXAMPLE}")
    optimizer = getattr(module, "make_optimizer", None)
    return ModelFile(path, module.make_model, module.make_batch, module.loss_fn, optimizer)


def _module(path: str) -> ModuleType:
    name = f"rota_model_file_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FormatError(f"{path} is no Python file; give one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where the sources of its classes are looked up
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))  # as `python path` has it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise FormatError(f"{path} cannot be run: {_told(error, path)}") from error
    finally:
        sys.path.pop(0)
    return module


def profile_file(
    file: ModelFile,
    rows: Iterable[int],
    *,
    device: str | None = None,
    repeats: int = 7,
    report: Callable[[str], None] = lambda _: None,
    cache: str | Path | None = None,
    refresh: bool = False,
) -> Profile:
    """The layers of its model for micro-batches of `rows` rows: measured on "cpu" (default) or "cuda", else estimated.

    For an estimate the model is made on the meta device, where it takes no memory.
    """
    measured = device is None or device in _REAL
    with torch.device("meta" if not measured else device or "cpu"):
        model = _made(file, "make_model", file.make_model)
    if not isinstance(model, nn.Module):
        raise FormatError(f"{file.path}: make_model returned a {type(model).__name__}; return an nn.Module")
    if measured and device is not None:
        model = model.to(device)

    def make_batch(count: int) -> tuple[Any, Any]:
        made = _made(file, f"make_batch({count})", lambda: file.make_batch(count))
        if not isinstance(made, tuple) or len(made) != 2:
            raise FormatError(f"{file.path}: make_batch({count}) returned no pair; return (inputs, targets)")
        return over_tensors(lambda tensor: tensor.to(device), made) if measured and device else made

    return profile_model(
        model,
        make_batch,
        rows,
        file.loss_fn,
        optimizer=file.make_optimizer,
        repeats=repeats,
        device=None if measured else device,
        report=report,
        cache=cache,
        refresh=refresh,
    )


def _made(file: ModelFile, what: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:
        raise FormatError(f"{file.path}: {what} failed: {_told(error, file.path)}") from error


def _told(error: Exception, path: str) -> str:
    """With the line of the file at `path` that it comes from."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{type(error).__name__}: {error}" + (f" (line {lines[-1]})" if lines else "")
