"""Other systems: the order of a plan for PyTorch's pipeline engine, traces of runs on it, layouts of other trainers.

Names are loaded when they are first used: traces and layouts can be read where torch is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rota.interop import deepspeed as deepspeed
    from rota.interop import megatron as megatron
    from rota.interop import torchtitan as torchtitan
    from rota.interop.modules import module_parts as module_parts
    from rota.interop.modules import parts_beginning_with as parts_beginning_with
    from rota.interop.planned_config import with_plan as with_plan
    from rota.interop.running_parts import check_parts as check_parts
    from rota.interop.torch_order import keep_order as keep_order
    from rota.interop.torch_order import schedule_from as schedule_from
    from rota.interop.traces import ImportedTrace as ImportedTrace
    from rota.interop.traces import import_traces as import_traces

_TRAINERS = ("deepspeed", "megatron", "torchtitan")
_HOMES = {
    "ImportedTrace": "rota.interop.traces",
    "check_parts": "rota.interop.running_parts",
    "import_traces": "rota.interop.traces",
    "keep_order": "rota.interop.torch_order",
    "module_parts": "rota.interop.modules",
    "parts_beginning_with": "rota.interop.modules",
    "schedule_from": "rota.interop.torch_order",
    "with_plan": "rota.interop.planned_config",
}

__all__ = [*_TRAINERS, *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _TRAINERS:
        return importlib.import_module(f"rota.interop.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'rota.interop' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
