"""Why a forward cannot be estimated: it needs data, which tensors on the meta device do not have."""

from __future__ import annotations

from traceback import walk_tb
from typing import Any

import torch
from torch import nn

from rota.models.source_places import user_place
from rota.torch_internals import ITEM, full_name_of, lacks_data

_ON_DEVICE = "measure on the device itself, where --device is cuda or left out"


def why_not_estimated(error: Exception, operation: Any) -> str:
    """What needed data, where, and what to do; "" if `error` has another cause.

    `operation` is the one on the meta device that raised `error`; None: none did.
    """
    if operation is None and not lacks_data(error):
        return ""
    place = user_place(reversed([*walk_tb(error.__traceback__)]))
    if operation is None:
        return f"it cannot be estimated, because at {place} PyTorch says: {_one_line(error)}; {_ON_DEVICE}"
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
        f"it cannot be estimated, because PyTorch cannot run {name} without data, at {place}: {_one_line(error)}; "
        f"{remedy}{_ON_DEVICE}"
    )


def module_that_raised(error: Exception) -> str:
    """The path of the innermost module whose forward raised it, such as "layers.3.moe"; "" if there is none."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    modules = [one for one in (frame.f_locals.get("self") for frame in frames) if isinstance(one, nn.Module)]
    for outer in modules:
        found = next((path for path, module in outer.named_modules() if module is modules[-1]), "")
        if found:
            return found
    return ""


def _one_line(error: Exception) -> str:
    """The beginning of the message: PyTorch goes on about how to build it otherwise."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text.split(". ")[0].rstrip(".")
