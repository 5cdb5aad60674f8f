"""Estimates the times of a model on the meta device from what each operation computes and moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from rota.models.carving.absent import Absent
from rota.profiling.clocks import Laps, Run
from rota.profiling.devices import DeviceModel
from rota.runtime.memory_watch import storages
from rota.torch_internals import (
    EFFICIENT_ATTENTION,
    FLASH_ATTENTION,
    FLASH_ATTENTION_BACKWARD,
    FLASH_ATTENTION_ON_CPU,
    FLASH_ATTENTION_ON_CPU_BACKWARD,
    FUSED_ATTENTION,
    FUSED_ATTENTION_BACKWARD,
    TorchDispatchMode,
    address_of,
    full_name_of,
    name_of,
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
            self.us += self.device.op_us(known or 0, moved, _dtype_of(read, written))
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


# --- floating-point operations ----------------------------------------------------------------------------------------
# PyTorch's own registry has convolutions and attention, and what users register by
# `torch.utils.flop_counter.register_flop_formula`. Rota counts products of matrices by itself: the registry lacks some,
# such as grouped ones and those in place, counts complex numbers as real ones, and fails if a product names its
# `out_dtype`. For the gradient of the weight of a convolution with groups, it counts each product once per group.

#: Kernels of attention that compute what the registered ones do, of arguments in the same order.
_SAME_FLOPS = {
    FLASH_ATTENTION_ON_CPU: FLASH_ATTENTION,
    FLASH_ATTENTION_ON_CPU_BACKWARD: FLASH_ATTENTION_BACKWARD,
    FUSED_ATTENTION: FLASH_ATTENTION,
    FUSED_ATTENTION_BACKWARD: FLASH_ATTENTION_BACKWARD,
}

#: Words in the names of PyTorch's operators that compute much for the bytes that they move. All others move bytes.
_COMPUTING = frozenset(
    (
        *("mm", "bmm", "addmm", "matmul", "linear", "trilinear", "attention", "rnn", "ctc", "cdist", "pdist"),
        *("conv", "conv2d", "conv3d", "convolution"),
        *("linalg", "cholesky", "solve", "triangular", "svd", "qr", "geqrf", "ormqr"),
    )
)
_OF_PYTORCH = frozenset({"aten", "prims"})


def num_flops(func: Any, args: Sequence[Any], kwargs: dict[str, Any], made: Any) -> int | None:
    """How many floating-point operations `func` did to make `made` of its arguments; None: unknown, perhaps many."""
    count = _COUNTS.get(full_name_of(func))
    if count is not None:
        return count(*args, **kwargs, out_val=made)
    packet = _SAME_FLOPS.get(func.overloadpacket, func.overloadpacket)
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=made))
    if torch.Tag.pointwise in func.tags:
        return 0
    may_be_many = func.namespace not in _OF_PYTORCH or not _COMPUTING.isdisjoint(name_of(func).split("_"))
    return None if may_be_many else 0


def _dtype_of(read: Sequence[Tensor], written: Sequence[Tensor]) -> torch.dtype:
    """The dtype in which an operation computes: that of its first operand, as its result may have a wider one."""
    numbers = (t.dtype for t in read if t.dtype is torch.int8 or t.is_floating_point() or t.is_complex())
    return next(numbers, (*written, *read)[0].dtype)


def _product(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Matrices or batches of them, or vectors: each number of `a` is multiplied with a row of `b`, and added up."""
    return 2 * (4 if a.is_complex() else 1) * a.numel() * (b.shape[-1] if b.dim() > 1 else 1)


def _added_product(_: Tensor, a: Tensor, b: Tensor, *__: Any, **___: Any) -> int:
    return _product(a, b)


def _products(left: Sequence[Tensor], right: Sequence[Tensor], **_: Any) -> int:
    return sum(map(_product, left, right))


def _grouped_product(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Each row or column counts, whichever group it is in. Groups in the columns of `b` are one matrix of `a` each."""
    return _product(a, b) // (a.shape[0] if a.dim() == 3 and b.dim() == 2 else 1)


def _convolution_backward(gradient: Tensor, x: Tensor, weight: Tensor, *others: Any, **_: Any) -> int:
    """Each of the two gradients takes what the forward does; that of the bias moves bytes."""
    _, _, _, _, is_transposed, _, _, wanted = others
    forward = 2 * (x if is_transposed else gradient).numel() * math.prod(weight.shape[1:])
    return forward * sum(map(bool, wanted[:2]))


_COUNTS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::mv", "aten::dot", "aten::vdot", "aten::_int_mm"), _product),
    **dict.fromkeys(("aten::_scaled_mm", "aten::_scaled_mm_v2"), _product),
    **dict.fromkeys(("aten::addmm", "aten::addmm_", "aten::_addmm_activation"), _added_product),
    **dict.fromkeys(("aten::baddbmm", "aten::baddbmm_", "aten::addbmm", "aten::addbmm_"), _added_product),
    **dict.fromkeys(("aten::addmv", "aten::addmv_"), _added_product),
    "aten::_foreach_mm": _products,
    **dict.fromkeys(("aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2"), _grouped_product),
    "aten::convolution_backward": _convolution_backward,
}
