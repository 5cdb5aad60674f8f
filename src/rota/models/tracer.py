"""The tracer: records a forward, operation by operation, and refuses what would get lost on the way."""

from __future__ import annotations

import builtins
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import Any, final

import torch
from torch import fx, nn

import rota.errors
from rota.errors import SplitError
from rota.models.cutpoint import CutPoint, find_cut_points

BY_HAND = "wire the stages by hand, Stages(modules, edges=...)"
TUCK_AWAY = f"move it into a sub-module without CutPoints, which is not traced into, or {BY_HAND}"
NOT_THE_USERS = ("<", *(f"{Path(module.__file__ or '').parent}{os.sep}" for module in (torch, rota.errors)))

# fx traces the first five only if the sizes come as a tuple, and lets the last deny that a traced tensor is one.
RECORDED = (torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn, torch.is_tensor)


def cut_here(name: str) -> None:
    """Stands in a graph for the call of the cut point of that name."""


def is_cut(node: fx.Node) -> bool:
    """Whether this node marks a cut point."""
    return node.target is cut_here


def is_trait(node: fx.Node) -> bool:
    """Whether this node reads the device or dtype of a value, or a part of that (`x.device.type`)."""
    if node.target is not getattr:
        return False
    owner, name = node.args
    return name in ("device", "dtype") or (isinstance(owner, fx.Node) and is_trait(owner))


@final
class _Proxy(fx.Proxy):
    """A value of the forward, more careful than fx's own."""

    def __getattr__(self, k: str) -> Any:
        attribute = fx.Proxy.__getattr__(self, k)
        if k in ("shape", "ndim"):
            _ = attribute.node  # the shape is read here; fx would read it where it is first used
        return attribute


@contextmanager
def isinstance_refused() -> Iterator[None]:
    """No `isinstance` of a traced value in the user's code: fx would deny that a tensor is one."""
    truly = builtins.isinstance

    def isinstance_of_known(value: object, kinds: Any) -> bool:
        if truly(value, fx.Proxy) and is_users(sys._getframe(1).f_code.co_filename):
            raise TypeError("isinstance of a value whose type the trace does not know")
        return truly(value, kinds)

    builtins.isinstance = isinstance_of_known
    try:
        yield
    finally:
        builtins.isinstance = truly


@final
class Tracer(fx.Tracer):
    """Traces into modules that hold a CutPoint, and into no others; inputs in `fixed` have that value."""

    proxy_buffer_attributes = True  # else what a forward does to its buffers alone would be done here, once

    def __init__(self, model: nn.Module, fixed: dict[str, Any]) -> None:
        super().__init__(autowrap_functions=RECORDED)
        self._autowrap_search.append(torch)  # as torch.zeros, not only where they were imported by name
        self._fixed = fixed
        self._cut_names = find_cut_points(model)
        self._called: set[CutPoint] = set()
        self._modes = _modes()
        self._thread = threading.get_ident()

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """The proxy that stands for a node's value in the traced forward."""
        return _Proxy(node, self)

    def create_args_for_root(self, *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        """The forward's function and its arguments: proxies, but the values of inputs in `fixed`."""
        function, values = super().create_args_for_root(*args, **kwargs)
        return function, [
            self._fixed.get(str(value.node.target), value) if isinstance(value, fx.Proxy) else value for value in values
        ]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
        """Whether the module stays one call in the graph: it holds no CutPoint."""
        return not find_cut_points(m)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Trace the call of a module. Each CutPoint is recorded as a cut; a second call of it raises SplitError."""
        if threading.get_ident() != self._thread:  # fx patches nn.Module for all threads
            return forward(*args, **kwargs)
        if not isinstance(m, CutPoint):
            return super().call_module(m, forward, args, kwargs)
        name = self._cut_names.setdefault(m, f"call {len(self._called)}")
        if m in self._called:
            raise SplitError(
                f"CutPoint {name} is called twice, again at {_place_now()}: "
                "each marks one place, so make one CutPoint for every call"
            )
        self._called.add(m)
        self.create_node("call_function", cut_here, (name,), {})
        return forward(*args, **kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """The attribute of a module, as a proxy if it is a parameter; other threads get it as it is."""
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Record an operation and its place in the source. Raises SplitError if a trace would lose its context."""
        node = super().create_node(kind, target, *args, **kwargs)
        node.meta["place"] = _place_now()
        if (function := autograd_function_now(_frames_now())) is not None:
            raise SplitError(
                f"{describe(node)} is inside the torch.autograd.Function {function.__qualname__}, whose backward a "
                f"trace would lose: {TUCK_AWAY}"
            )
        if _modes() != self._modes:
            raise SplitError(
                f"{describe(node)} runs in a context (no_grad, autocast, ...) that the forward enters, "
                f"but a trace does not keep it: {TUCK_AWAY}"
            )
        return node


def _modes() -> tuple[Any, ...]:
    accelerator = torch.accelerator.current_accelerator()
    kinds = dict.fromkeys(("cpu", "cuda", *([] if accelerator is None else [accelerator.type])))
    autocast = [
        torch.get_autocast_dtype(kind)
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        else None
        for kind in kinds
    ]
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast)


def _place_now() -> str:
    """The line of the forward that is being traced."""
    return user_place(_frames_now())


def _frames_now() -> Iterator[tuple[FrameType, int]]:
    """Of the forward that is being traced, innermost first."""
    return takewhile(lambda at: at[0].f_code is not fx.Tracer.trace.__code__, traceback.walk_stack(None))


def autograd_function_now(frames: Iterable[tuple[FrameType, int]] | None = None) -> type | None:
    """The class of the innermost `torch.autograd.Function` whose forward runs, by default anywhere on the stack."""
    classes: list[Any] = list(torch.autograd.Function.__subclasses__())
    for function in classes:  # grows: subclasses of subclasses
        classes += function.__subclasses__()
    forwards = {getattr(function.forward, "__code__", None): function for function in classes}
    codes = (frame.f_code for frame, _ in frames or traceback.walk_stack(sys._getframe()))
    return next((forwards[code] for code in codes if code in forwards), None)


def describe_function(function: Any) -> str:
    """A function by its name and the place where it is defined."""
    original = getattr(function, "_torchdynamo_orig_callable", None)
    if original is not None:
        return f"torch.compile of {describe_function(original)}"
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"


def user_place(frames: Iterable[tuple[FrameType, int]]) -> str:
    """`file:line (source line)` of the first frame, innermost first, that is neither torch's nor Rota's."""
    for frame, line in frames:
        file = frame.f_code.co_filename
        if is_users(file):
            return f"{file}:{line} ({getline(file, line).strip()})"
    return "an unknown line"


def is_users(file: str) -> bool:
    """Whether a file of Python code is neither torch's nor Rota's."""
    return not file.startswith(NOT_THE_USERS)


def describe(node: fx.Node) -> str:
    """An operation by its name and the user's line."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return f"{name!r} at {node.meta['place']}"
