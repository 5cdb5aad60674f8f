"""Runs that leave no trace: modules on copies of their tensors, and forwards without dropout and casts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import nn

from rota.models.carving.stage import CarvedStage
from rota.models.randomness import random_state_kept
from rota.runtime.reducing.sharded_stages import is_sharded
from rota.torch_internals import TorchDispatchMode

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


@contextmanager
def apart(modules: Iterable[nn.Module], dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, the modules work on copies of their tensors, without gradients, floating-point ones in `dtype`.

    Afterwards parameters, `.grad`, buffers and random states are what they were. Shards of FSDP are not copied: a step
    changes only their `.grad`. With `dtype` None, each tensor keeps its dtype.
    """
    everything = nn.ModuleList(modules)
    tensors = {t: t.data for t in (*everything.parameters(), *everything.buffers()) if not (is_sharded(t) or t.is_meta)}
    gradients = {parameter: parameter.grad for parameter in everything.parameters()}
    buffers = [(module, *pair) for module in everything.modules() for pair in module.named_buffers(recurse=False)]
    with random_state_kept(everything), ExitStack() as stack:
        for module in everything:
            if isinstance(module, CarvedStage):
                stack.enter_context(module.absents_as(partial(in_dtype, dtype=dtype)))
        try:
            for parameter in gradients:
                parameter.grad = None
            for tensor, data in tensors.items():
                tensor.data = in_dtype(data.clone(), dtype)
            yield
        finally:
            for parameter in gradients:
                parameter.grad = None  # it may have another dtype
            for tensor, data in tensors.items():
                tensor.data = data
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            for module, name, buffer in buffers:  # a forward may have replaced it
                setattr(module, name, buffer)


def in_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The tensor in `dtype` if it is floating-point or complex; unchanged if it is not, or if `dtype` is None."""
    if dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return tensor.to(dtype.to_complex() if tensor.is_complex() else dtype)


@final
class ForComparison(TorchDispatchMode):
    """Removes what would make equal models differ, whether a module, a function or attention uses it.

    Args:
        without_dropout: dropout keeps everything. On CPUs it draws `bernoulli_(keep)` into a fresh tensor and divides
            by `keep`.
        in_float64: what the model casts to a narrower dtype, such as the numbers inside a norm, is float64 too.
    """

    def __init__(self, without_dropout: bool, in_float64: bool) -> None:
        super().__init__()
        self._without_dropout, self._in_float64 = without_dropout, in_float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._in_float64 and kwargs.get("dtype") in _NARROW:
            kwargs = {**kwargs, "dtype": torch.float64}
        if self._without_dropout and func is torch.ops.aten.bernoulli_.float:
            return args[0].fill_(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
        if self._without_dropout and func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        return func(*args, **kwargs)
