"""Tessel's placements with Tessel's costs: F takes 1, B takes 3, stages that all ranks share take 1 each way."""

from rota import Cluster, Costs, Placement
from rota.shapes import SHAPES


def tessel(shape: str, num_ranks: int, limit_bytes: int | None = None) -> Placement:
    """A rank's own stages hold 1; those that are shared hold nothing, but for K's, which holds 1 on each rank."""
    n = num_ranks
    num_stages = n + SHAPES[shape].shared
    shared = {"m": {0}, "nn": {0, 1 + n // 2}, "nn-eager": {0, 2}, "k": {n}}.get(shape, set())
    costs = Costs(
        forward_us=(1,) * num_stages,
        backward_us=tuple(1 if s in shared else 3 for s in range(num_stages)),
        activation_bytes=tuple(int(s not in shared or shape == "k") for s in range(num_stages)),
    )
    return SHAPES[shape].place(costs, Cluster.uniform(n, limit_bytes))
