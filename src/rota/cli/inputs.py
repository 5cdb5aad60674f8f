"""Costs, cluster and placement from what stands on the command line."""

from __future__ import annotations

from argparse import Namespace

from rota.cli import files
from rota.costs import Cluster, Costs, assumed_costs
from rota.errors import PlacementError
from rota.placement import Placement
from rota.shapes import SHAPES

_GUESSES = ("forward_us", "backward_us", "weight_us", "activation_bytes", "boundary_bytes")


def costs_of(arguments: Namespace, stages_a_rank: int = 1, further_stages: int = 0) -> Costs:
    """From the file, else uniform: as many stages as asked for, or as the ranks need."""
    if arguments.costs is not None:
        if arguments.stages is not None:
            raise files.InputError(
                f"--stages {arguments.stages} and --costs {arguments.costs}: the file has the stages"
            )
        return measured(arguments)
    if not (arguments.stages or arguments.ranks):
        raise files.InputError("how many stages? give --ranks, --stages or --costs")
    return uniform(arguments, arguments.stages or arguments.ranks * stages_a_rank + further_stages)


def measured(arguments: Namespace) -> Costs:
    for name in _GUESSES:
        if getattr(arguments, name) is not None:
            option = "--" + name.removesuffix("_bytes").replace("_", "-")
            raise files.InputError(f"{option} and --costs {arguments.costs}: the file has them; leave {option} out")
    return files.read_costs(arguments.costs)


def uniform(arguments: Namespace, num_stages: int) -> Costs:
    given = {name: getattr(arguments, name) for name in _GUESSES if getattr(arguments, name) is not None}
    return assumed_costs(num_stages, **given)


def cluster_of(arguments: Namespace, num_ranks: int, limit_bytes: int | None) -> Cluster:
    """On `--ranks`, else on `num_ranks`."""
    return Cluster.uniform(
        arguments.ranks or max(num_ranks, 1), limit_bytes, arguments.latency_us, arguments.bytes_per_us
    )


def shaped(arguments: Namespace, limit_bytes: int | None) -> Placement:
    """In the shape asked for."""
    shape = SHAPES[arguments.shape]
    costs = costs_of(arguments, shape.a_rank, shape.shared)
    if arguments.split_backward:
        costs = costs.with_split_backward()
    num_ranks = (costs.num_stages - shape.shared) // shape.a_rank
    cluster = cluster_of(arguments, num_ranks, limit_bytes)
    try:
        return shape.place(costs, cluster)
    except PlacementError as error:  # it may name a function that the shape is made by
        raise files.InputError(f"--shape {arguments.shape}: {error}") from None
