"""Absent: a tensor of another stage, with shape, dtype and device but no data."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from rota.core.errors import PipelineError
from rota.models.carving.operations import is_shape_only, leaves_of, mapped, run_on_meta
from rota.models.source_places import user_place
from rota.torch_internals import WITHOUT_TORCH_FUNCTION, name_of, written_arguments

_NEEDS_VALUES = (
    "so what the forward does there depends on values that live on another stage, which the example did not show: "
    "split with an example that takes this path, or cut so that both are on one stage"
)


@final
class _ThreadState(threading.local):
    """What this thread is running."""

    #: The name of the stage's own unit that runs, which may not compute with an Absent; None outside of units.
    inside: str | None = None
    #: Whether only shapes are wanted: then no operation makes a real tensor from an Absent.
    only_shapes = False


thread_state = _ThreadState()


@final
class Absent(Tensor):
    """A tensor of another stage. Results computed from an Absent are Absent; reading its values raises PipelineError.

    Operations that read only its shape (`zeros_like`, `new_ones`) give real tensors.
    """

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device) -> Absent:
        """An Absent on `device` with the shape and dtype of `meta`."""
        made: Absent = Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device
        )
        made.meta = meta
        return made

    meta: Tensor
    requires_grad = False  # a weight's is what it was when the model was split
    __torch_function__ = WITHOUT_TORCH_FUNCTION  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """The shape and dtype, for messages."""
        return f"Absent({list(self.shape)}, {self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy it as its shape, dtype and device."""
        del protocol
        return absent, (tuple(self.shape), self.dtype, self.device, self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Absent:
        """Another Absent of the same shape."""
        memo[id(self)] = made = Absent(self.meta, self.device)
        made.requires_grad = self.requires_grad
        return made

    def changed(self, change: Callable[[Tensor], Tensor]) -> Absent:
        """What `change` makes of it, such as one of another dtype."""
        made = absent_like(change(self))
        if made.requires_grad != self.requires_grad:
            made = absent(tuple(made.shape), made.dtype, made.device, self.requires_grad)
        return made

    def tolist(self) -> Any:
        """Raises PipelineError, as do all that read its values without an operation."""
        raise PipelineError(f"the values of a tensor of another stage are read at {place_now()}, {_NEEDS_VALUES}")

    numpy = __array__ = tolist  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run the operation on shapes alone."""
        del types
        kwargs = dict(kwargs or {})
        if is_shape_only(func) and not thread_state.only_shapes:
            return func(*mapped(_zeros, args), **mapped(_zeros, kwargs))
        if thread_state.inside is not None and func is not torch.ops.aten.detach.default:
            raise PipelineError(
                f"{thread_state.inside} reads a value of another stage ({name_of(func)}) at {place_now()}, "
                f"{_NEEDS_VALUES}"
            )
        device = next(leaf.device for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Absent))
        for written in written_arguments(func, args, kwargs):
            if not isinstance(written, Absent):
                raise PipelineError(
                    f"{name_of(func)} at {place_now()} writes a value of another stage into a tensor of this one, "
                    f"{_NEEDS_VALUES}"
                )
        if kwargs.get("device") is not None:
            device, kwargs["device"] = kwargs["device"], torch.device("meta")
        try:
            made = run_on_meta(func, mapped(_shape_of, args), mapped(_shape_of, kwargs))
        except (RuntimeError, NotImplementedError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise PipelineError(
                f"{name_of(func)} at {place_now()} does not run on a tensor of another stage, of which only the shape "
                f"is known here ({reason}): split with an example that takes this path, or cut so that both are on one "
                "stage"
            ) from error
        if name_of(func).endswith("_") and isinstance(args[0], Absent):
            return args[0]
        if not any(isinstance(leaf, Tensor) for leaf in leaves_of(made)) and made is not None:
            raise PipelineError(
                f"{name_of(func)} at {place_now()} reads the value of a tensor of another stage, {_NEEDS_VALUES}"
            )
        return mapped(lambda leaf: Absent(leaf, device) if isinstance(leaf, Tensor) else leaf, made)


def absent(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, requires_grad: bool = False) -> Absent:
    """An Absent of this shape."""
    made = Absent(torch.empty(shape, dtype=dtype, device="meta"), device)
    made.requires_grad = requires_grad
    return made


def absent_like(tensor: Tensor) -> Absent:
    """An Absent of the tensor's shape, dtype and device."""
    if isinstance(tensor, Absent):
        return tensor
    return absent(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)


def place_now() -> str:
    """The place in the user's code that is running."""
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
