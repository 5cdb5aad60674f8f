"""How loops over arrays are compiled, by numba: when they are first used on a machine, then they are loaded from disk.

Compiling takes long for what a loop mentions, not for what it does. So loops avoid what drags in much of numba's own
library (assigning a slice, which can fail with a message; `argsort`; lists; unpacking an array), and constants go to
inner loops as `int64(2)`: for a plain 2, numba compiles another version of the inner loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numba.core import event
from numpy.typing import NDArray

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


class _Stopwatch(event.Listener):  # type: ignore[misc]
    """Measures the time in which this process compiles."""

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
event.register("numba:compile", _stopwatch)


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
