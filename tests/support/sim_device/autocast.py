"""`torch.autocast("sim")`: the casts of CUDA's autocast. PyTorch has them for its own devices alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: In the lower precision, and in float32, as CUDA has them; those that models and losses here use.
LOWER = (
    *("addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "conv_transpose2d.input"),
    *("linear", "matmul", "mm", "mv", "prelu", "scaled_dot_product_attention"),
)
FLOAT32 = (
    *("cosine_similarity", "exp", "expm1", "group_norm", "huber_loss", "kl_div", "l1_loss", "layer_norm", "log"),
    *("log1p", "logsumexp", "mse_loss", "nll_loss", "nll_loss_nd", "pow.Tensor_Scalar", "reciprocal", "rsqrt"),
    *("smooth_l1_loss", "softplus", "binary_cross_entropy_with_logits", "log_softmax.int", "softmax.int", "sum"),
    *("sum.dim_IntList", "cumsum"),
)

_KEY = torch._C.DispatchKey.AutocastPrivateUse1
_EXCLUDED = torch._C.DispatchKeySet(_KEY)


def install() -> list[torch.library.Library]:
    """Register the casts. They are there as long as the result is held."""
    fallback, library = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for names, dtype in ((LOWER, None), (FLOAT32, torch.float32)):
        for name in names:
            packet, _, overload = name.partition(".")
            func = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, _casting(func, dtype), "AutocastPrivateUse1")
    return [fallback, library]


def _casting(func: Any, dtype: torch.dtype | None) -> Callable[..., Any]:
    def cast(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
        if is_float and value.device.type == "sim":
            return value.to(dtype or torch.get_autocast_dtype("sim"))
        return value

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
            return func(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})

    return run
