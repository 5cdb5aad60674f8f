"""The shapes of what a unit of another stage returns: its own forward on Absent arguments, once per signature."""

from __future__ import annotations

import contextvars
import copy
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rota.core.errors import PipelineError
from rota.models.carving.absent import absent, absent_like, thread_state
from rota.models.carving.recording import Output
from rota.models.carving.structure import PLAIN, flatten
from rota.models.randomness import random_state_kept
from rota.models.source_places import user_place
from rota.torch_internals import run_uncompiled

_MOST_SIGNATURES = 256


def signature_of(values: Iterable[Any], found: list[Any]) -> list[Any]:
    """What shapes may depend on, added to `found`: shapes and dtypes of tensors, plain values, the types of others."""
    for value in values:
        if isinstance(value, Tensor):
            found += (value.shape, value.dtype)
        elif isinstance(value, (tuple, list)):
            found.append(len(value))
            signature_of(value, found)
        elif isinstance(value, dict):
            found += value
            signature_of(value.values(), found)
        else:
            kind = type(value)
            found.append(value if kind in PLAIN else kind)
    return found


@final
class OutputShapes:
    """Absents for the outputs of units of one kind, by signature; units of one kind share it."""

    def __init__(self) -> None:
        self._known: dict[Any, list[Any]] = {}

    def clear(self) -> None:
        """Forget all shapes, as after a change of device or dtype."""
        self._known.clear()

    def find(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        output: Output,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mode: Any,
    ) -> list[Any]:
        """An Absent for each leaf of the output that is a tensor. `mode`: what else the shapes may depend on."""
        key = (mode, *signature_of(kwargs.values(), signature_of(args, [])))
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MOST_SIGNATURES:
                self._known.clear()
            found = self._known[key] = _run_absent(module, forward, output, (args, kwargs), mode[0])
        return found


def _run_absent(
    module: nn.Module,
    forward: Callable[..., Any],
    output: Output,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    device: torch.device,
) -> list[Any]:
    try:
        with _AbsentCopies():
            args, kwargs = copy.deepcopy(call)
        # In a context of its own, without hooks, so that nothing that collects outputs on the side sees these.
        with _without_hooks(module), torch.no_grad(), random_state_kept(module), _only_shapes(), run_uncompiled():
            made = contextvars.Context().run(forward, *args, **kwargs)
        leaves: list[Any] = []
        if flatten(made, leaves) != output.structure:
            raise PipelineError("a different structure")
    except Exception as error:
        arguments: list[Any] = []
        flatten(call, arguments)
        return [_argument_shaped(module, leaf, arguments, device, error) for leaf in output.leaves]
    return [absent_like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _argument_shaped(module: nn.Module, leaf: Any, arguments: list[Any], device: torch.device, error: Exception) -> Any:
    """An Absent like the argument of the same shape in the recording; for a forward that needs values (MoE routers)."""
    if not leaf.is_tensor or leaf.argument is not None:
        return None
    if leaf.same_shape_argument is None:
        place = user_place(reversed([*traceback.walk_tb(error.__traceback__)]))
        reason = " ".join(f"{type(error).__name__}: {error}".split())
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
    held = [(hooks, dict(hooks)) for one in module.modules() for hooks in (one._forward_hooks, one._forward_pre_hooks)]
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
