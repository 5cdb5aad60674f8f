"""Plans run on `torch.distributed`: one process per rank, messages over Gloo, the planned order, all of it recorded.

Names are loaded when they are first used: `runtime.launching` starts ranks without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rota.runtime import spmd as spmd
    from rota.runtime.device.local import local_device as local_device
    from rota.runtime.launcher_files import given_plan as given_plan
    from rota.runtime.materializing import materialize as materialize
    from rota.runtime.materializing import meta_init as meta_init
    from rota.runtime.meshes import local_stages as local_stages
    from rota.runtime.meshes import mesh as mesh
    from rota.runtime.pipeline import Pipeline as Pipeline
    from rota.runtime.step_handles import StepHandle as StepHandle

_HOMES = {
    "Pipeline": "pipeline",
    "StepHandle": "step_handles",
    "given_plan": "launcher_files",
    "local_device": "device.local",
    "local_stages": "meshes",
    "materialize": "materializing",
    "mesh": "meshes",
    "meta_init": "materializing",
}

__all__ = [*_HOMES, "spmd"]


def __getattr__(name: str) -> Any:
    if name == "spmd":
        return importlib.import_module("rota.runtime.spmd")
    if name not in _HOMES:
        raise AttributeError(f"module 'rota.runtime' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"rota.runtime.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
