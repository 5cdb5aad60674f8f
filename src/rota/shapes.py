"""Placements named after the picture of one micro-batch on the ranks: V, X, M, NN and K.

Lin et al., "Tessel: Boosting Distributed Execution of Large DNN Models via Flexible Schedule Search", HPCA 2024.
Time runs to the right, ranks downwards; `S` is a stage on all ranks together, such as a sharded embedding. Every shape
is a function (costs, cluster) -> Placement; it raises PlacementError if the number of stages or ranks does not fit.

    V  F . . B    X  F .|. F .|B .|. B    M  S F . . B S    NN  S F S . . S B S    K  F . S . B
       . F B .       . F|F .|. B|B .         S . F B . S        S . S F B S . S       . F S B .
                                                                                      F . S . B
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.errors import PlacementError
from rota.core.placement import Placement
from rota.core.placing import bidirectional, interleaved, place, wave


def v_shape(costs: Costs, cluster: Cluster) -> Placement:
    """A chain: stage i on rank i."""
    return place(costs, cluster)


def x_shape(costs: Costs, cluster: Cluster) -> Placement:
    """Two chains with the same weights in opposite directions; `costs` are for one chain (`rota.bidirectional`)."""
    return bidirectional(costs, cluster)


def m_shape(costs: Costs, cluster: Cluster) -> Placement:
    """Stage 0 on all ranks together, then a chain: stage i on rank i - 1."""
    return _with_shared("m_shape", costs, cluster, [0])


def nn_shape(costs: Costs, cluster: Cluster) -> Placement:
    """Two stages on all ranks together: the first, and one between the two halves of the chain."""
    return _with_shared("nn_shape", costs, cluster, [0, 1 + cluster.num_ranks // 2])


def nn_eager_shape(costs: Costs, cluster: Cluster) -> Placement:
    """Two stages on all ranks together: the first, and one right after the chain's first."""
    return _with_shared("nn_eager_shape", costs, cluster, [0, 2])


def k_shape(costs: Costs, cluster: Cluster) -> Placement:
    """Two branches, each a chain on half of the ranks; both end in the last stage, on all ranks together."""
    n = cluster.num_ranks
    _require_stages("k_shape", costs, n, n + 1)
    if n % 2:
        raise PlacementError(f"k_shape needs an even number of ranks, a half for each branch, not {n}; use {n + 1}")
    edges = [(i, i + 1) for i in range(n - 1) if i + 1 != n // 2] + [(n // 2 - 1, n), (n - 1, n)]
    return place(costs, cluster, [*range(n), range(n)], edges)


def _with_shared(name: str, costs: Costs, cluster: Cluster, shared: Sequence[int]) -> Placement:
    """A chain whose stages `shared` are on all ranks; the others are on one rank each."""
    n = cluster.num_ranks
    _require_stages(name, costs, n, n + len(shared))
    own = iter(range(n))
    return place(costs, cluster, [range(n) if stage in shared else next(own) for stage in range(costs.num_stages)])


def _require_stages(name: str, costs: Costs, num_ranks: int, num_stages: int) -> None:
    if costs.num_stages != num_stages:
        raise PlacementError(f"{name} needs {num_stages} stages on its {num_ranks} ranks, not {costs.num_stages}")


class Shape(NamedTuple):
    """A named shape.

    Attributes:
        place: Makes the placement.
        per_rank: Stages per rank, or the least number of them.
        shared: Stages on all ranks; on n ranks a shape needs `per_rank * n + shared` stages, or more.
        summary: A few words.
    """

    place: Callable[[Costs, Cluster], Placement]
    per_rank: int
    shared: int
    summary: str


#: Shapes by their names on the command line.
SHAPES: Mapping[str, Shape] = {
    "v": Shape(v_shape, 1, 0, "a chain, one stage per rank"),
    "x": Shape(x_shape, 1, 0, "two chains in opposite directions with the same weights"),
    "m": Shape(m_shape, 1, 1, "a first stage that all ranks run together, then a chain"),
    "nn": Shape(nn_shape, 1, 2, "like m, with another such stage in the middle of the chain"),
    "nn-eager": Shape(
        nn_eager_shape, 1, 2, "like nn, but the second shared stage comes third in the chain, not in the middle"
    ),
    "k": Shape(k_shape, 1, 1, "two branches that meet in a stage that all ranks run together"),
    "interleaved": Shape(interleaved, 2, 0, "a chain placed round-robin, several stages per rank"),
    "wave": Shape(wave, 2, 0, "a chain down the ranks and back up, two or more stages per rank"),
}
