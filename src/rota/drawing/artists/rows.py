"""How a rank's row is divided: the bar of its ops, and under it its memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

HALF = 0.42  # of a row's height; rows are 1 apart


class Rows(NamedTuple):
    """Heights around a rank's number, downwards; the strip of memory has none where there is no memory to show."""

    bar_top: float
    bar_bottom: float
    strip_top: float
    strip_bottom: float


PLAIN = Rows(-HALF, HALF, HALF, HALF)
WITH_MEMORY = Rows(-HALF, 0.12, 0.18, HALF)


def boxes(left: Array, right: Array, top: Array, bottom: Array) -> Any:
    """The corners of n boxes: (n, 4, 2)."""
    return np.stack([np.stack([left, right, right, left], 1), np.stack([top, top, bottom, bottom], 1)], 2)
