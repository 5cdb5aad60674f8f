"""Estimates the times of a model on the meta device from what each operation computes and moves."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple, final

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rota.models.carving.absent import Absent
from rota.profiling.clocks import Laps, Run
from rota.profiling.devices import DeviceModel
from rota.profiling.flops import dtype_of, num_flops
from rota.runtime.memory_watch import storages
from rota.torch_internals import (
    EFFICIENT_ATTENTION,
    FLASH_ATTENTION,
    FLASH_ATTENTION_ON_CPU,
    TorchDispatchMode,
    address_of,
    full_name_of,
    tensors_anywhere,
    writes_to_arguments,
)


@final
class Roofline(TorchDispatchMode):
    """A clock that advances by the estimated time of each operation that runs while it is entered; see `Clock`."""

    def __init__(self, device: DeviceModel) -> None:
        super().__init__()
        self.num_flops, self.us = 0, 0.0
        self.device = device
        self._uncounted: dict[str, None] = {}

    def take_uncounted(self) -> tuple[str, ...]:
        """The operators since the last call whose floating-point operations are unknown: only their bytes count."""
        uncounted, self._uncounted = tuple(self._uncounted), {}
        return uncounted

    def timed(self, run: Run, repeats: int, least_ns: int, together: bool) -> Laps:  # noqa: ARG002 - they do not vary
        """The estimated times of the parts of `run`, which runs once."""
        marks: list[float] = []
        with self:
            run(lambda: marks.append(self.us))
        return Laps([end - start for start, end in pairwise(marks)], 0.0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        read, written = [*tensors_anywhere((args, kwargs))], [*tensors_anywhere(made)]
        if any(isinstance(tensor, Absent) for tensor in read):  # the device computes nothing for other stages' tensors
            return made
        memory_read = {*map(address_of, storages(read))}
        is_view = memory_read.issuperset(map(address_of, storages(written))) and not writes_to_arguments(func)
        if not is_view and any(tensor.is_meta for tensor in (*read, *written)):
            known = num_flops(func, args, kwargs, made)
            if known is None:
                self._uncounted[full_name_of(func)] = None
            moved = sum(_num_bytes(tensor) for tensor in (*read, *written))
            self.num_flops += known or 0
            self.us += self.device.op_us(known or 0, moved, dtype_of(read, written))
        return made


def _num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor that a kernel reads or writes: an expanded element counts once."""
    numbers = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return int(torch.Size(numbers).numel()) * tensor.element_size() if tensor.numel() else 0


@final
class Kernels(TorchFunctionMode):
    """Chooses the kernels that PyTorch uses on the device itself, if the meta device would use others.

    These are attention in one kernel, which keeps no matrix of weights, and on GPUs, dropout that keeps one byte per
    element.
    """

    def __init__(self, device: DeviceModel) -> None:
        super().__init__()
        self._is_gpu = device.is_gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            fused = self._fused(_Attention(*args, **kwargs))
            if fused is not None:
                return fused
        if func is functional.dropout and self._is_gpu:
            x, p, training, in_place = _dropout_arguments(*args, **kwargs)
            if training and 0 < p < 1 and not in_place:
                return torch.native_dropout(x, p, True)[0]
        return func(*args, **kwargs)

    def _fused(self, call: _Attention) -> Any:
        """Attention in one kernel; None if no such kernel supports these arguments."""
        query, key, value, mask, *_ = call
        is_half = query.dtype in (torch.float16, torch.bfloat16)
        if call.enable_gqa and not (self._is_gpu and mask is None and is_half):  # flash attention alone shares heads
            return None
        if query.dim() != 4 or query.shape[-1] != value.shape[-1] or (mask is not None and mask.requires_grad):
            return None
        if not self._is_gpu:
            if call.dropout_p or (call.is_causal and query.shape[-2] != key.shape[-2]):
                return None
            return FLASH_ATTENTION_ON_CPU(query, key, value, 0.0, call.is_causal, attn_mask=mask, scale=call.scale)[0]
        how = call.dropout_p, call.is_causal
        if mask is None and is_half:
            return FLASH_ATTENTION(query, key, value, *how, scale=call.scale)[0]
        if mask is not None:
            mask = mask.expand(*query.shape[:-1], key.shape[-2])
        return EFFICIENT_ATTENTION(query, key, value, mask, True, *how, scale=call.scale)[0]


class _Attention(NamedTuple):
    """The arguments of `scaled_dot_product_attention`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def _dropout_arguments(
    x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[torch.Tensor, float, bool, bool]:
    return x, p, training, inplace
