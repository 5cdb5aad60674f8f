"""The floating-point operations of PyTorch's operators, from the shapes of their arguments.

PyTorch's own registry has convolutions and attention, and what users register by
`torch.utils.flop_counter.register_flop_formula`. Rota counts products of matrices by itself: the registry lacks some,
such as grouped ones and those in place, counts complex numbers as real ones, and fails if a product names its
`out_dtype`. For the gradient of the weight of a convolution with groups, it counts each product once per group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from rota.torch_internals import (
    FLASH_ATTENTION,
    FLASH_ATTENTION_BACKWARD,
    FLASH_ATTENTION_ON_CPU,
    FLASH_ATTENTION_ON_CPU_BACKWARD,
    FUSED_ATTENTION,
    FUSED_ATTENTION_BACKWARD,
    full_name_of,
    name_of,
)

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


def dtype_of(read: Sequence[Tensor], written: Sequence[Tensor]) -> torch.dtype:
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
