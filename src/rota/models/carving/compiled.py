"""Copies of modules that `Module.compile()` was called on: they lose that, and are compiled with the same options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def compile_alike(original: nn.Module, copied: nn.Module) -> None:
    """Compile `copied` and the modules in it as those of `original` are."""
    for one, other in zip(original.modules(), copied.modules(), strict=True):
        if one._compiled_call_impl is not None:
            other._compiled_call_impl = _options_of(one._compiled_call_impl)(other._call_impl)


def _options_of(compiled: Any) -> Callable[..., Any]:
    """What compiles a function as `torch.compile` did that returned `compiled`."""
    from torch._dynamo.eval_frame import _TorchDynamoContext  # it is loaded by now

    cells = [cell.cell_contents for cell in compiled.__closure__ or ()]
    return next((one for one in cells if isinstance(one, _TorchDynamoContext)), torch.compile)
