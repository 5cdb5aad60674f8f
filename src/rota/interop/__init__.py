"""Other systems' engines: PyTorch's own pipeline engine as a second backend, and traces of runs on it.

Names are loaded when they are first used: traces can be read where torch is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rota.interop.naming import named_actions as named_actions
    from rota.interop.torch_engine import TorchEngine as TorchEngine
    from rota.interop.traces import ImportedTrace as ImportedTrace
    from rota.interop.traces import import_traces as import_traces

_HOMES = {
    "ImportedTrace": "rota.interop.traces",
    "TorchEngine": "rota.interop.torch_engine",
    "import_traces": "rota.interop.traces",
    "named_actions": "rota.interop.naming",
}

__all__ = ["ImportedTrace", "TorchEngine", "import_traces", "named_actions"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rota.interop' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
