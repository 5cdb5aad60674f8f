"""Layer costs -> where to cut the chain into stages: the slowest rank as fast as it can be, exactly.

A cut of n layers into p parts is its p + 1 boundaries: part i has the layers boundaries[i] to boundaries[i + 1] - 1.

    costs  3 1 2 | 5 | 4 2        balanced([3, 1, 2, 5, 4, 2], 3) == [0, 3, 4, 6]

`cut` knows ranks, their memory, and several stages on each; the others share out one number a layer.
"""

from rota.cutting.cuts import Cut, cut
from rota.cutting.merging import merge
from rota.cutting.sharing import balanced, by_parameters, by_regex, uniform

__all__ = ["Cut", "balanced", "by_parameters", "by_regex", "cut", "merge", "uniform"]
