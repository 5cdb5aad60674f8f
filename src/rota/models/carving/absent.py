"""Absent: a tensor of another stage, with shape, dtype and device but no data; and what units make of such tensors."""

from __future__ import annotations

import contextvars
import copy
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rota.core.errors import PipelineError, error_line
from rota.models.carving.operations import is_shape_only, leaves_of, mapped, run_on_meta, shape_of
from rota.models.carving.recording import Output
from rota.models.carving.units import PLAIN, flatten
from rota.models.randomness import random_state_kept
from rota.models.source_places import place_now, user_place
from rota.torch_internals import WITHOUT_TORCH_FUNCTION, name_of, run_uncompiled, written_arguments

_NEEDS_VALUES = (
    "so what the forward does there depends on values that live on another stage, which the example did not show: "
    "split with an example that takes this path, or cut so that both are on one stage"
)


@final
class _ThreadState(threading.local):
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
        made.requires_grad = self.requires_grad
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
            reason = error_line(error)
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


def _zeros(leaf: Any) -> Any:
    if not isinstance(leaf, Absent):
        return leaf
    return torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)


def _shape_of(leaf: Any) -> Any:
    return leaf.meta if isinstance(leaf, Absent) else shape_of(leaf)


# --- outputs of units of other stages ---------------------------------------------------------------------------------

_MOST_SIGNATURES = 256
ModuleCall: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]  # its arguments


def _signature(values: Iterable[Any], signature: list[Any]) -> list[Any]:
    """What shapes may depend on, appended: shapes and dtypes of tensors, plain values, the types of others."""
    for value in values:
        if isinstance(value, Tensor):
            signature += (value.shape, value.dtype)
        elif isinstance(value, (tuple, list)):
            signature.append(len(value))
            _signature(value, signature)
        elif isinstance(value, dict):
            signature += value
            _signature(value.values(), signature)
        else:
            signature.append(value if type(value) in PLAIN else type(value))
    return signature


@final
class OutputShapes:
    """Absents for the outputs of units of one kind, by signature; units of one kind share it."""

    def __init__(self) -> None:
        self._known: dict[Any, list[Any]] = {}

    def clear(self) -> None:
        """Forget all shapes, as after a change of device or dtype."""
        self._known.clear()

    def find(
        self, module: nn.Module, forward: Callable[..., Any], output: Output, call: ModuleCall, mode: Any
    ) -> list[Any]:
        """An Absent for each leaf of the output that is a tensor. `mode`: what else the shapes may depend on."""
        args, kwargs = call
        key = (mode, *_signature(kwargs.values(), _signature(args, [])))
        if key not in self._known:
            if len(self._known) >= _MOST_SIGNATURES:
                self._known.clear()
            self._known[key] = _run_absent(module, forward, output, call, mode[0])
        return self._known[key]


def _run_absent(
    module: nn.Module, forward: Callable[..., Any], output: Output, call: ModuleCall, device: torch.device
) -> list[Any]:
    try:
        with _AbsentCopies():
            args, kwargs = copy.deepcopy(call)
        # In a context of its own, without hooks, so that nothing that collects outputs on the side sees these.
        with _without_hooks(module), torch.no_grad(), random_state_kept(module), _only_shapes(), run_uncompiled():
            structure, leaves = flatten(contextvars.Context().run(forward, *args, **kwargs))
        if structure != output.structure:
            raise PipelineError("a different structure")
    except Exception as error:
        _, arguments = flatten(call)
        return [_argument_shaped(module, leaf, arguments, device, error) for leaf in output.leaves]
    return [absent_like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _argument_shaped(module: nn.Module, leaf: Any, arguments: list[Any], device: torch.device, error: Exception) -> Any:
    """An Absent like the argument of the same shape in the recording; for a forward that needs values (MoE routers)."""
    if not leaf.is_tensor or leaf.argument is not None:
        return None
    if leaf.same_shape_argument is None:
        place = user_place(reversed([*traceback.walk_tb(error.__traceback__)]))
        reason = error_line(error)
        raise PipelineError(
            f"this stage needs the shape of what {type(module).__name__} returns on another stage, but its forward "
            f"fails without values at {place} ({reason}): let the stage before end with it, or return something of the "
            "shape of an argument"
        ) from error
    return absent(tuple(arguments[leaf.same_shape_argument].shape), leaf.dtype, device)


@final
class _AbsentCopies(TorchFunctionMode):
    """Inside the context, deep copies have Absents instead of tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is Tensor.__deepcopy__:
            return args[1].setdefault(id(args[0]), absent_like(args[0]))
        return func(*args, **(kwargs or {}))


@contextmanager
def _only_shapes() -> Iterator[None]:
    thread_state.only_shapes = True
    try:
        yield
    finally:
        thread_state.only_shapes = False


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    held = [
        (hooks, dict(hooks)) for inner in module.modules() for hooks in (inner._forward_hooks, inner._forward_pre_hooks)
    ]
    for hooks, _ in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in held:
            hooks.update(before)


def kind_of(module: nn.Module, recorded: Any) -> Any:
    """Modules of equal kinds return equal shapes for equal signatures. `recorded`: what it returned in the example."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return type(module), repr(module), tuple((name, t.shape, t.dtype) for name, t in tensors), recorded
