"""How loops are compiled: once on a machine, then they are loaded from disk.

Compiling takes long for what a loop mentions, not for what it does. So loops avoid what drags in much of numba's own
library (assigning a slice, which can fail with a message; `argsort`; lists; unpacking an array), and constants go to
inner loops as `np.int64(2)`: for a plain 2, numba compiles another version of the inner loop.
"""

from __future__ import annotations

from numba import njit

#: For loops that Python calls.
loop = njit(cache=True, nogil=True, no_cfunc_wrapper=True)  # type: ignore[call-overload]
#: For loops that only other loops call: calling one from Python ends the process.
inner = njit(cache=True, nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)  # type: ignore[call-overload]


@inner
def copy(source, target):  # type: ignore[no-untyped-def]
    """Copies all values; both arrays are equally long."""
    for i in range(len(source)):
        target[i] = source[i]


@inner
def copy_part(source, target, first, end):  # type: ignore[no-untyped-def]
    """Copies the values from `first` to `end`."""
    for i in range(first, end):
        target[i] = source[i]
