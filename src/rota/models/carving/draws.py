"""Random numbers that a forward draws while it is recorded: where, by which rates, and whether they decide anything."""

from __future__ import annotations

import os
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, final

from torch import Tensor, nn

from rota.core.errors import SplitError
from rota.models.randomness import RandomStates
from rota.models.source_places import is_users, user_place
from rota.torch_internals import name_of

_RATES = ("drop", "prob", "rate")
IN_A_MODULE = "use a module for it (nn.Dropout for F.dropout), whose result the stages share"


def rates_read(model: nn.Module, frames: Iterable[tuple[FrameType, int]]) -> str:
    """The rates that the code which runs reads from its module or the module's config: `decoder.layerdrop (0.1)`.

    Args:
        model: The model that runs.
        frames: Of the code that runs, innermost first.
    """
    paths = {module: path for path, module in model.named_modules()}
    for frame, _ in frames:
        module = frame.f_locals.get("self")
        if not is_users(frame.f_code.co_filename) or not isinstance(module, nn.Module) or module not in paths:
            continue
        path = f"{paths[module]}." if paths[module] else ""
        owners = {path: module, f"{path}config.": getattr(module, "config", None)}
        return ", ".join(
            f"{prefix}{name} ({value})"
            for prefix, owner in owners.items()
            for name in dict.fromkeys(frame.f_code.co_names)
            if type(value := getattr(owner, name, None)) is float
            and 0 < value <= 1
            and any(part in name for part in _RATES)
        )
    return ""


def remedy(rates: str, otherwise: str) -> str:
    """What to do about a draw of code that reads these rates."""
    return f"set {rates} to 0.0, which that code reads, or {otherwise}" if rates else otherwise


def refuse_decision(place: str, by: str, rates: str) -> NoReturn:
    """Raise SplitError: what was drawn decides at `place` what modules are called."""
    raise SplitError(
        f"the forward decides by random numbers at {place}, before the last call of a module with weights, and stages "
        f"follow the calls of one forward: {remedy(rates, 'decide in a module')} (drawn by {by})"
    )


def is_certain(func: Any, args: tuple[Any, ...], draws: set[int]) -> bool:
    """Whether an operation compares numbers drawn between 0 and 1 with a bound that makes the result certain."""
    if name_of(func) not in ("lt", "le", "gt", "ge") or id(args[0]) not in draws or isinstance(args[1], Tensor):
        return False
    return args[1] < 0 or args[1] > 1 or (args[1] == 0 and name_of(func) in ("lt", "ge"))


@contextmanager
def watch_python_draws(model: nn.Module, run: Callable[[], Any]) -> Iterator[Callable[[], bool]]:
    """Inside, Python's or NumPy's random numbers may only be compared with bounds that decide whatever they are.

    Otherwise raises SplitError, as these numbers leave no label on tensors. `run`: repeats what is watched, to find the
    line. Yields whether any number was drawn.
    """
    draws: list[DrawnNumber] = []
    numpy = sys.modules.get("numpy")
    functions = [(random, "random"), (random, "uniform")]
    if numpy is not None:
        functions += [(numpy.random, name) for name in ("random", "random_sample", "rand", "uniform")]
    before = [(owner, name, getattr(owner, name)) for owner, name in functions]
    thread = threading.get_ident()

    def standing_in(original: Callable[..., Any], is_uniform: bool) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            bounds = args or (0.0, 1.0)
            is_number = is_uniform and len(bounds) == 2 and all(type(bound) in (int, float) for bound in bounds)
            if kwargs or threading.get_ident() != thread or not (is_number or not args):
                return original(*args, **kwargs)
            draws.append(DrawnNumber(model, *map(float, bounds)))
            return draws[-1]

        return draw

    states = RandomStates(model, seeded=True)
    for owner, name, original in before:
        setattr(owner, name, standing_in(original, name == "uniform"))
    try:
        yield lambda: bool(draws)
        if states.changed():
            states.restore()
            line = states.first_change(run, _is_users)
            _refuse(model, [] if line is None else [line, *traceback.walk_stack(line[0].f_back)])
    except TypeError as error:
        if DrawnNumber.__name__ not in str(error):
            raise
        _refuse(model, [*reversed([*traceback.walk_tb(error.__traceback__)])])
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)


def _is_users(file: str) -> bool:
    return is_users(file) and f"{os.sep}numpy{os.sep}" not in file  # which calls functions of its own when it draws


def _refuse(model: nn.Module, frames: list[tuple[FrameType, int]]) -> NoReturn:
    frames = [(frame, line) for frame, line in frames if _is_users(frame.f_code.co_filename)]
    raise SplitError(
        f"the forward of {type(model).__name__} uses Python's or NumPy's random numbers, or its own generator, at "
        f"{user_place(frames)}, and each stage would draw its own: "
        + remedy(
            rates_read(model, frames),
            "draw them where batches are made and pass them to the forward, or draw PyTorch's in a module's forward",
        )
    )


@final
class DrawnNumber:
    """Stands for a random number between two bounds. What its value matters for raises SplitError."""

    def __init__(self, model: nn.Module, low: float, high: float) -> None:
        self._model, self._low, self._high = model, min(low, high), max(low, high)

    # A draw of 53 bits that equals its lower bound is left out: it happens once in 10^16 times.

    def _is_below(self, bound: Any) -> bool:
        if not isinstance(bound, (int, float)) or self._low < bound <= self._high:
            self._matters()
        return bound > self._high

    def _is_above(self, bound: Any) -> bool:
        return not self._is_below(bound)

    def _matters(self, *_: Any, **__: Any) -> NoReturn:
        _refuse(self._model, [*traceback.walk_stack(sys._getframe())])

    __lt__ = __le__ = _is_below
    __gt__ = __ge__ = _is_above
    __hash__ = __eq__ = __ne__ = __bool__ = __float__ = __int__ = __index__ = _matters
    __neg__ = __pos__ = __abs__ = __round__ = __trunc__ = __floor__ = __ceil__ = _matters
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _matters
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __divmod__ = __rdivmod__ = _matters
    __array__ = __str__ = __format__ = _matters
