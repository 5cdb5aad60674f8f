"""Varuna, on Rota: CutPoints in a model, `Varuna` to train it in stages, `Profiler` and `AutoConfig` to choose them.

What needs torch is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "AutoConfig": "rota.compat.varuna.auto_config",
    "CutPoint": "rota.models",
    "Profiler": "rota.compat.varuna.profiler",
    "Varuna": "rota.compat.varuna.varuna",
}

__all__ = ["AutoConfig", "CutPoint", "Profiler", "Varuna"]

if TYPE_CHECKING:
    from rota.compat.varuna.auto_config import AutoConfig as AutoConfig
    from rota.compat.varuna.profiler import Profiler as Profiler
    from rota.compat.varuna.varuna import Varuna as Varuna
    from rota.models import CutPoint as CutPoint


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
