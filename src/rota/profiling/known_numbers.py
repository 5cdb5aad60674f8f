"""Whole numbers on the meta device, for forwards that ask about positions and masks."""

from __future__ import annotations

from typing import Any, final

import torch
from torch.utils.weak import WeakIdKeyDictionary

from rota.models.carving.operations import is_random, run_on_meta
from rota.runtime.messages import over_tensors
from rota.torch_internals import ITEM, TorchDispatchMode, over_tensors_anywhere, tensors_anywhere, writes_to_arguments

_MOST_NUMBERS = 1_000_000  # of a tensor: whole masks are not needed


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
