from . import deepspeed as deepspeed, megatron as megatron, torchtitan as torchtitan
from .modules import (
    check_parts as check_parts,
    module_parts as module_parts,
    parts_beginning_with as parts_beginning_with,
)
from .planned_config import with_plan as with_plan
from .torch_order import keep_order as keep_order, schedule_from as schedule_from
from .traces import ImportedTrace as ImportedTrace, import_traces as import_traces
