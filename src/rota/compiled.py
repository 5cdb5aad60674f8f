"""How loops over arrays are compiled, by numba: when they are first used on a machine, then they are loaded from disk.

Compiling takes long for what a loop mentions, not for what it does. So loops avoid what drags in much of numba's own
library (assigning a slice, which can fail with a message; `argsort`; lists; unpacking an array), and constants go to
inner loops as `int64(2)`: for a plain 2, numba compiles another version of the inner loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numba.core import event
from numpy.typing import NDArray

_MOST_PLAIN_S, _MOST_PLAIN_SIZE = 0.2, 20_000  # for `quick`: seconds in all, and elements of all arrays of a call

_Function = TypeVar("_Function", bound=Callable[..., Any])
_njit: Any = njit  # its own types lose those of the function
int64 = cast("type[int]", np.int64)  #: in loops, where every whole number is one


def loop(function: _Function) -> _Function:
    """For loops that Python calls."""
    compiled: _Function = _njit(cache=True, nogil=True, no_cfunc_wrapper=True)(function)
    return compiled


def inner(function: _Function) -> _Function:
    """For loops that only other loops call: calling one from Python ends the process."""
    compiled: _Function = _njit(cache=True, nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    return compiled


def quick(function: _Function) -> _Function:
    """As `loop`, for loops whose work is in proportion to their arrays: while these are small, it waits with compiling.

    They run as plain Python until that has taken `_MOST_PLAIN_S`, unless an earlier process has compiled the loop. So a
    small problem that a few calls solve is solved before numba could compile one of these loops.
    """
    compiled: Any = loop(function)
    compiled_for = compiled._compile_for_args  # which returns what is to be called
    spent_s = 0.0

    def call(*args: Any) -> Any:
        nonlocal spent_s
        began_s = time.thread_time()
        result = _unboxed(_plain(compiled)(*args))
        spent_s += time.thread_time() - began_s
        return result

    def callable_for(*args: Any) -> Any:
        is_plain = spent_s < _MOST_PLAIN_S and _size(args) < _MOST_PLAIN_SIZE and not is_on_disk(compiled)
        return call if is_plain else compiled_for(*args)

    compiled._compile_for_args = callable_for
    result: _Function = compiled
    return result


@cache
def _plain(compiled: Any) -> Any:
    """A loop as a function of Python, with all loops that it calls."""
    function = compiled.py_func
    scope = dict(function.__globals__)
    for name in function.__code__.co_names:
        if hasattr(scope.get(name), "py_func"):
            scope[name] = _plain(scope[name])
    return FunctionType(function.__code__, scope, function.__name__)


def _size(value: Any) -> int:
    """Elements of all arrays in tuples of tuples."""
    if isinstance(value, tuple):
        return sum(map(_size, value))
    return value.size if isinstance(value, np.ndarray) else 0


def _unboxed(value: Any) -> Any:
    """With numbers of Python, as compiled loops return them."""
    if isinstance(value, tuple):
        return tuple(map(_unboxed, value))
    return value.item() if isinstance(value, np.generic) else value


class _Stopwatch(event.Listener):
    def __init__(self) -> None:
        self.seconds, self._depth, self._began_s = 0.0, 0, 0.0

    def on_start(self, _: object) -> None:
        if not self._depth:
            self._began_s = time.monotonic()
        self._depth += 1

    def on_end(self, _: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.seconds += time.monotonic() - self._began_s


_stopwatch = _Stopwatch()
cast("Any", event).register("numba:compile", _stopwatch)


def compiling_s() -> float:
    """Seconds in which this process has compiled loops; loading them from disk does not count."""
    return _stopwatch.seconds


def is_on_disk(compiled: Any) -> bool:
    """Whether an earlier process has compiled a loop: where numba keeps them, in `NUMBA_CACHE_DIR` if that is set."""
    path = Path(compiled.py_func.__code__.co_filename)
    return any(Path(compiled.stats.cache_path).glob(f"{path.stem}.{compiled.py_func.__name__}-*.nbi"))


@inner
def copy(source: NDArray[Any], target: NDArray[Any]) -> None:
    """Copies all values; both arrays are equally long."""
    for i in range(len(source)):
        target[i] = source[i]


@inner
def copy_rows(source: NDArray[Any], target: NDArray[Any]) -> None:
    """Copies all values of two-dimensional arrays of one shape."""
    for i in range(source.shape[0]):
        for j in range(source.shape[1]):
            target[i, j] = source[i, j]


@inner
def copy_part(source: NDArray[Any], target: NDArray[Any], first: int, end: int) -> None:
    """Copies the values from `first` to `end`."""
    for i in range(first, end):
        target[i] = source[i]
