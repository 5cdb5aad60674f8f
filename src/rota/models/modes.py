"""Modules that compute something else in train() than in eval()."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from rota.models.carving.units import DROPOUTS, NORMS

_RATES = ("drop", "jitter", "noise")  # parts of the names of attributes with a rate


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put the modules in eval() inside the context, and restore the mode of each inner module after it."""
    before = [(inner, inner.training) for module in modules for inner in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for inner, training in before:
            inner.training = training


def warn_of_eval_mode(modules: Sequence[nn.Module]) -> None:
    """Warn if a model is to be trained whose stages are all in eval(), and for which that makes a difference.

    Single modules in eval() are left alone, as a BatchNorm that keeps its statistics is.
    """
    if any(module.training for module in modules):
        return
    names = [
        f"{type(inner).__name__} {path or 'itself'} of stage {stage}"
        for stage, module in enumerate(modules)
        for path, inner in module.named_modules()
        if _depends_on_mode(inner)
    ]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        warnings.warn(
            f"the model is trained in eval() mode, in which {names[0]}{more} do as in evaluation (from_pretrained of "
            f"transformers returns models so); call model.train() before rota.split to train as usual",
            stacklevel=3,
        )


def _depends_on_mode(module: nn.Module) -> bool:
    """Whether it is a dropout or a norm, or has a rate of its own, as attention and RNNs have."""
    if isinstance(module, DROPOUTS):
        return module.p > 0
    if isinstance(module, NORMS):
        return module.track_running_stats
    rates: list[Any] = [value for name, value in vars(module).items() if any(part in name for part in _RATES)]
    return any(type(rate) in (int, float) and rate > 0 for rate in rates)
