"""Absent: a tensor of another stage, with shape, dtype and device but no data."""

from __future__ import annotations

import threading
import traceback
from typing import Any, final

import torch
from torch import Tensor

from rota.errors import PipelineError
from rota.models.carving.dispatch import is_shape_only, leaves_of, mapped, name_of, written_arguments
from rota.models.tracer import user_place

_READ_ALL = (
    "so what the forward does there depends on numbers of another stage, which the example did not show: split with an "
    "example that takes this path, or cut so that both are on one stage"
)


@final
class Now(threading.local):
    """What this thread runs."""

    #: The name of a stage's own unit, which may not compute with Absent.
    inside: str | None = None
    #: Whether only shapes are wanted: then no operation makes a real tensor of an Absent.
    only_shapes = False


now = Now()


@final
class Absent(Tensor):
    """What is computed from an Absent is Absent too; what asks for its numbers raises PipelineError.

    Operations that read only its shape (`zeros_like`, `new_ones`) give real tensors.
    """

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device) -> Absent:
        """`meta` has its shape and dtype."""
        made: Absent = Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device
        )
        made.meta = meta
        return made

    meta: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """For people."""
        return f"Absent({list(self.shape)}, {self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Made again from its shape."""
        del protocol
        return absent, (tuple(self.shape), self.dtype, self.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Absent:
        """Another of the same shape."""
        memo[id(self)] = made = Absent(self.meta, self.device)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """The operation on shapes alone."""
        del types
        kwargs = dict(kwargs or {})
        if is_shape_only(func) and not now.only_shapes:
            return func(*mapped(_zeros, args), **mapped(_zeros, kwargs))
        if now.inside is not None and func is not torch.ops.aten.detach.default:
            raise PipelineError(
                f"{now.inside} reads a value of another stage ({name_of(func)}) at {place_now()}, {_READ_ALL}"
            )
        device = next(leaf.device for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Absent))
        for written in written_arguments(func, args):
            if not isinstance(written, Absent):
                raise PipelineError(
                    f"{name_of(func)} at {place_now()} writes a value of another stage into a tensor of this one, "
                    f"{_READ_ALL}"
                )
        if kwargs.get("device") is not None:
            device, kwargs["device"] = kwargs["device"], torch.device("meta")
        try:
            made = func(*mapped(_shape_of, args), **mapped(_shape_of, kwargs))
        except (RuntimeError, NotImplementedError) as error:
            raise PipelineError(
                f"{name_of(func)} at {place_now()} asks for the numbers in a value of another stage, {_READ_ALL}"
            ) from error
        if func._schema.name.endswith("_") and isinstance(args[0], Absent):
            return args[0]
        if not any(isinstance(leaf, Tensor) for leaf in leaves_of(made)) and made is not None:
            raise PipelineError(
                f"{name_of(func)} at {place_now()} asks for the number in a value of another stage, {_READ_ALL}"
            )
        return mapped(lambda leaf: Absent(leaf, device) if isinstance(leaf, Tensor) else leaf, made)


def absent(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Absent:
    """An Absent of this shape."""
    return Absent(torch.empty(shape, dtype=dtype, device="meta"), device)


def absent_like(tensor: Tensor) -> Absent:
    """An Absent of the tensor's shape, dtype and device."""
    return tensor if isinstance(tensor, Absent) else absent(tuple(tensor.shape), tensor.dtype, tensor.device)


def place_now() -> str:
    """The line of the forward that is running."""
    return user_place(traceback.walk_stack(None))


def _zeros(leaf: Any) -> Any:
    if not isinstance(leaf, Absent):
        return leaf
    return torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)


def _shape_of(leaf: Any) -> Any:
    if isinstance(leaf, Absent):
        return leaf.meta
    if isinstance(leaf, Tensor):
        return leaf.detach().to("meta") if leaf.device.type != "meta" else leaf
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf
