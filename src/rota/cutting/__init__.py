"""Cut a chain of layers into stages so that the slowest rank is as fast as possible, exactly.

A cut of n layers into p parts is its p + 1 boundaries: part i has the layers boundaries[i] to boundaries[i + 1] - 1.

    costs  3 1 2 | 5 | 4 2        balanced([3, 1, 2, 5, 4, 2], 3) == [0, 3, 4, 6]

`cut` considers ranks, their memory and several stages per rank. The others divide one number per layer.
"""

from rota.cutting.cuts import Cut, cut
from rota.cutting.partition import balanced, by_regex, merge, uniform

__all__ = ["Cut", "balanced", "by_regex", "cut", "merge", "uniform"]
