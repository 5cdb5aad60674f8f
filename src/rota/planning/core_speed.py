"""How fast a core of this machine is now, and which measurements were made while it was about as fast.

A core may become slower by a third to a half for some seconds and nothing on this machine shows why: it belongs to a
virtual machine whose neighbour is busy, or it is hot. Steps that were measured at two speeds cannot be compared.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

_LOOPS = 20_000  # 1 to 2 ms
#: How many times as long a computation may take as another one that ran at about the same speed.
ALIKE = 1.1


def computation_us() -> float:
    """The CPU time of a fixed computation in this thread: while the thread waits for a core, no time counts."""
    began_ns = time.thread_time_ns()
    sum(n * n for n in range(_LOOPS))
    return (time.thread_time_ns() - began_ns) / 1000


def is_alike(a_us: float, b_us: float) -> bool:
    """Whether two computations ran at about the same speed."""
    return max(a_us, b_us) <= ALIKE * min(a_us, b_us)


def slowdown(computations_us: Iterable[float]) -> float:
    """How many times as long the slowest of these computations took as the fastest; 1.0 for none."""
    found = [*computations_us]
    return max(found) / min(found) if found else 1.0


def common_us(of_groups: Sequence[Sequence[float]]) -> float:
    """The speed at which most groups have a measurement, as the time of a computation.

    Args:
        of_groups: What the computation took during each measurement of a group.

    Returns:
        One of these times: the one that is alike in most groups, then in most measurements, then the shortest. 0.0 if
        there are none.
    """

    def rank(us: float) -> tuple[int, int, float]:
        alike = [sum(is_alike(us, other_us) for other_us in of_group) for of_group in of_groups]
        return sum(map(bool, alike)), sum(alike), -us

    return max((us for of_group in of_groups for us in of_group), key=rank, default=0.0)
