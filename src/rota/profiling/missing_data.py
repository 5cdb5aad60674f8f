"""Why a forward cannot be estimated: what of it needs data, which the meta device does not have."""

from __future__ import annotations

from traceback import walk_tb

import torch
from torch import nn

from rota.core.errors import error_line
from rota.models.carving.operations import run_on_meta
from rota.models.source_places import user_place
from rota.torch_internals import ITEM, full_name_of, lacks_data

_ON_DEVICE = "measure on the device itself, where --device is cuda or left out"


def why_not_estimated(error: Exception) -> str:
    """What needed data that the meta device does not have, where, and what to do; "" if `error` has another cause."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    operations = [frame.f_locals["func"] for frame in frames if frame.f_code is run_on_meta.__code__]
    operation = operations[0] if operations and (isinstance(error, NotImplementedError) or lacks_data(error)) else None
    if operation is None and not lacks_data(error):
        return ""
    place = user_place(reversed([*walk_tb(error.__traceback__)]))
    reason = error_line(error).split(". ")[0].rstrip(".")  # PyTorch goes on about how to build it otherwise
    if operation is None:
        return f"it cannot be estimated, because at {place} PyTorch says: {reason}; {_ON_DEVICE}"
    name = full_name_of(operation)
    if torch.Tag.dynamic_output_shape in operation.tags:
        return (
            f"it cannot be estimated, because the shape of what {name} makes depends on data, at {place}; keep shapes "
            f"fixed (torch.nn.functional.grouped_mm on tokens sorted by expert, or a fixed capacity per expert), or "
            f"{_ON_DEVICE}"
        )
    if operation is ITEM or torch.Tag.data_dependent_output in operation.tags:
        return (
            f"it cannot be estimated, because the forward asks for a number that depends on data ({name}), at {place}; "
            f"let it compute the same whatever the number is (torch.where instead of if), or {_ON_DEVICE}"
        )
    remedy = "" if operation.namespace == "aten" else "register its shapes by torch.library.register_fake, or "
    return (
        f"it cannot be estimated, because PyTorch cannot run {name} without data, at {place}: {reason}; {remedy}"
        f"{_ON_DEVICE}"
    )


def module_that_raised(error: Exception) -> str:
    """The path of the innermost module whose forward raised it, such as "layers.3.moe"; "" if there is none."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    selves = (frame.f_locals.get("self") for frame in frames)
    modules = [module for module in selves if isinstance(module, nn.Module)]
    for outer in modules:
        if name := next((path for path, module in outer.named_modules() if module is modules[-1]), ""):
            return name
    return ""
