"""DeepSpeed's pipeline parallelism on Rota: `schedule`, `topology`, `utils` and `module` as DeepSpeed has them.

`to_plan` makes a Plan of any PipeSchedule. What needs torch is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rota.compat.deepspeed.plans import to_plan

_HOMES = {"PipelineModule": "module", "LayerSpec": "specs", "TiedLayerSpec": "specs", "initialize": "engine"}

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec", "initialize", "to_plan"]

if TYPE_CHECKING:
    from rota.compat.deepspeed.engine import initialize as initialize
    from rota.compat.deepspeed.module import PipelineModule as PipelineModule
    from rota.compat.deepspeed.specs import LayerSpec as LayerSpec
    from rota.compat.deepspeed.specs import TiedLayerSpec as TiedLayerSpec


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
