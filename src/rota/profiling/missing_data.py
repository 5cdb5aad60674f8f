"""Forwards that need data, which the meta device does not have: whole numbers are known; else, why not estimated."""

from __future__ import annotations

from traceback import walk_tb
from typing import Any, final

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from rota.core.errors import error_line
from rota.models.carving.operations import is_random, run_on_meta
from rota.models.source_places import user_place
from rota.runtime.messages import over_tensors
from rota.torch_internals import (
    ITEM,
    TorchDispatchMode,
    full_name_of,
    lacks_data,
    over_tensors_anywhere,
    tensors_anywhere,
    writes_to_arguments,
)

_MOST_NUMBERS = 1_000_000  # of a tensor: whole masks are not needed
_ON_DEVICE = "measure on the device itself, where --device is cuda or left out"


@final
class KnownNumbers(TorchDispatchMode):
    """Computes whole numbers and bools on the CPU besides, where they follow from inputs and shapes alone."""

    def __init__(self) -> None:
        super().__init__()
        self._known = WeakIdKeyDictionary()

    def on_meta(self, value: Any) -> Any:
        """The value on the meta device; the whole numbers in it are known."""

        def change(tensor: torch.Tensor) -> torch.Tensor:
            made = tensor.to("meta")
            if not tensor.is_meta and _is_countable(tensor):
                self._known[made] = _laid_out_as(made, tensor)
            return made

        return over_tensors(change, value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = [*tensors_anywhere((args, kwargs))]
        if func is ITEM and read[0] in self._known:
            return self._known[read[0]].item()
        made = run_on_meta(func, args, kwargs) if any(tensor.is_meta for tensor in read) else func(*args, **kwargs)
        if writes_to_arguments(func):
            if any(map(_is_countable, read)):
                self._known = WeakIdKeyDictionary()  # views of what was written to are others, too
            return made
        follows = not is_random(func) and all(tensor in self._known for tensor in read if tensor.is_meta)
        if follows and isinstance(made, torch.Tensor) and made.is_meta and _is_countable(made):
            args, kwargs = over_tensors_anywhere(lambda tensor: self._known.get(tensor, tensor), (args, kwargs))
            if not read or "device" in kwargs:
                kwargs = {**kwargs, "device": torch.device("cpu")}
            self._known[made] = func(*args, **kwargs)
        return made


def _laid_out_as(made: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the strides of its copy, from which PyTorch chooses the operations that both then do."""
    if tensor.stride() == made.stride():
        return tensor
    return torch.empty_strided(made.size(), made.stride(), dtype=tensor.dtype).copy_(tensor)


def _is_countable(tensor: torch.Tensor) -> bool:
    is_whole = not (tensor.is_floating_point() or tensor.is_complex())
    return type(tensor) is torch.Tensor and is_whole and tensor.numel() <= _MOST_NUMBERS


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
