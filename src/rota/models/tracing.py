"""trace: a model's forward as a graph with its cut points marked, checked to say what the forward does."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from rota.errors import SplitError
from rota.models.randomness import RandomStates
from rota.models.tracer import TUCK_AWAY, Tracer, describe, is_cut, is_users, isinstance_refused, user_place

# Tracing patches Python and PyTorch for the whole process: two traces at once would leave patches behind.
_ONE_AT_A_TIME = threading.RLock()


@dataclass(frozen=True)
class Trace:
    """What a model's forward does."""

    graph: fx.Graph
    constants: dict[str, Tensor]  # made by the forward itself, by the names under which the graph reads them

    @property
    def cut_names(self) -> list[str]:
        """Names of the cut points that the forward calls, in order."""
        return [str(node.args[0]) for node in self.graph.nodes if is_cut(node)]


def trace(model: nn.Module) -> Trace:
    """Trace `model`, leaving it as it was. Raises SplitError where a graph cannot say what the forward does."""
    training, evaluating = (_trace_once(model, mode) for mode in (True, False))
    difference = _first_difference(training, evaluating)
    if difference is not None:
        raise SplitError(
            f"{describe(difference)} differs between training and evaluation, or from one call to the next, "
            f"but a trace keeps it as it was: use a module for it (nn.Dropout for F.dropout), {TUCK_AWAY}"
        )
    return training


def honours_none(model: nn.Module, name: str, whole: Trace) -> bool:
    """Whether the trace `whole`, made with a value for input `name`, also says what the forward does with None.

    `if mask is None:` asks about the input itself, which tracing does not see.
    """
    try:
        without = _trace_once(model, training=True, fixed={name: None})
    except SplitError:
        return False
    return _first_difference(without, whole, none=name) is None


def _trace_once(model: nn.Module, training: bool, fixed: dict[str, Any] | None = None) -> Trace:
    with _ONE_AT_A_TIME, _left_as_it_was(model) as written:
        for module in model.modules():
            module.training = training
        try:
            with isinstance_refused():
                graph = _without_draws(model, lambda: Tracer(model, fixed or {}).trace(model))
        except SplitError:
            raise
        except Exception as error:
            place = user_place(reversed([*traceback.walk_tb(error.__traceback__)]))
            reason = " ".join(f"{type(error).__name__}: {error}".split(". ")[0].split()).rstrip(".")
            raise SplitError(
                f"{type(model).__name__} cannot be traced at {place}: {reason}. A trace knows no values to decide "
                f"by: {TUCK_AWAY}"
            ) from error
        constants = {name: getattr(model, name) for name in written() if name.startswith("_tensor_constant")}
        for name in written():
            if name not in constants:
                raise SplitError(f"forward of {type(model).__name__} sets {name}, which a stage would not: {TUCK_AWAY}")
    return Trace(graph, constants)


def _without_draws(model: nn.Module, run: Callable[[], fx.Graph]) -> fx.Graph:
    """What `run` returns; raises SplitError where it draws random numbers, which a trace would keep as they were."""
    states = RandomStates(model)
    try:
        graph = run()
    except BaseException:
        states.restore()
        raise
    if not states.changed():
        return graph
    after = RandomStates(model)
    states.restore()
    line = states.first_change(run, is_users)
    if line is None:  # it was another thread
        after.restore()
        return graph
    states.restore()
    raise SplitError(
        f"forward of {type(model).__name__} draws random numbers, or seeds them, at {user_place([line])}: a trace "
        f"keeps what they were in one call. Use a module for it (nn.Dropout), {TUCK_AWAY}"
    )


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[Callable[[], list[str]]]:
    """Restore the attributes of all modules on leaving; yields a function for the paths of those set meanwhile."""
    before = [
        (path, attributes, dict(attributes))
        for path, module in model.named_modules()
        for attributes in (vars(module), module._parameters, module._buffers)
    ]

    def written() -> list[str]:
        return [
            f"{path}.{name}".lstrip(".")
            for path, now, then in before
            for name in now
            if name != "training" and (name not in then or now[name] is not then[name])
        ]

    try:
        yield written
    finally:
        for _, now, then in before:
            now.clear()
            now.update(then)


def _first_difference(one: Trace, other: Trace, none: str | None = None) -> fx.Node | None:
    """The first operation where two traces differ, if any; `other` gets None for the input named `none`."""
    both: Iterator[tuple[fx.Node, fx.Node]] = zip(one.graph.nodes, other.graph.nodes, strict=False)
    for a, b in both:  # each ends with its only output node, so the shorter cannot be all of the longer's beginning
        if _says(a) != _says(b, none) or not _same_constant(a, one, other):
            return b if a.op == "output" else a
    return None


def _says(node: fx.Node, none: str | None = None) -> tuple[Any, ...]:
    """All that a node does, comparable between two traces of a model."""
    args, kwargs = fx.node.map_arg(
        (node.args, node.kwargs), lambda arg: None if (arg.op, arg.target) == ("placeholder", none) else arg
    )
    return node.op, node.target, repr(args), repr(kwargs)


def _same_constant(node: fx.Node, one: Trace, other: Trace) -> bool:
    name = str(node.target)
    if node.op != "get_attr" or name not in one.constants:
        return True
    a, b = one.constants[name], other.constants[name]
    if a.is_meta or b.is_meta:  # they have no numbers to compare
        return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    return torch.equal(a, b)
