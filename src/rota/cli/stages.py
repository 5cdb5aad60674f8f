"""What stages cost and where they are, as the options of a command say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rota.cli import files
from rota.cli.command import Options
from rota.cli.requirements import InputError
from rota.core.cluster import Cluster
from rota.core.costs import Costs, assumed_costs
from rota.core.errors import PlacementError
from rota.core.placement import Placement
from rota.core.units import count_text
from rota.shapes import SHAPES

#: The links of this machine between so many ranks, if they are known.
LinksHere = Callable[[int], "Cluster | None"]

_UNIFORM = ("forward_us", "backward_us", "weight_us", "activation_bytes", "boundary_bytes")


def costs_of(options: Options, stages_per_rank: int = 1, further_stages: int = 0) -> Costs:
    """The costs in the file, or uniform ones for --stages stages or as many as the ranks need."""
    if options.costs is not None:
        if options.stages is not None:
            both = f"--stages {options.stages} and --costs {options.costs}"
            raise InputError(f"{both}: the file already defines the stages; leave --stages out")
        costs = measured(options)
        return costs.with_snapshots() if options.snapshots else costs
    if options.snapshots:
        raise InputError(
            "--snapshots needs --costs FILE with the sizes of the stages' states, which rota.profile measures"
        )
    if not (options.stages or options.ranks):
        raise InputError("how many stages? give --ranks, --stages or --costs")
    return uniform(options, options.stages or options.ranks * stages_per_rank + further_stages)


def measured(options: Options) -> Costs:
    """The costs in the file. Raises InputError if options give costs as well."""
    for name in _UNIFORM:
        if getattr(options, name) is not None:
            option = "--" + name.removesuffix("_bytes").replace("_", "-")
            raise InputError(
                f"{option} and --costs {options.costs}: the file already has all costs; leave {option} out"
            )
    return files.read_costs(options.costs)


def uniform(options: Options, num_stages: int) -> Costs:
    """The costs that the options give, the same for every stage."""
    costs = {name: getattr(options, name) for name in _UNIFORM}
    return assumed_costs(num_stages, **{name: cost for name, cost in costs.items() if cost is not None})


def cluster_of(
    options: Options, num_ranks: int, limit_bytes: int | None, links_here: LinksHere = lambda _: None
) -> Cluster:
    """The cluster of `--ranks` ranks, or else of `num_ranks`, with the links of `--links` or the same ones for all.

    Where no option says what links are, `links_here` may know those of this machine.
    """
    num_ranks = options.ranks or max(num_ranks, 1)
    measured = None
    if options.links is not None:
        if options.link is not None:
            raise InputError(f"--links {options.links} has all links; leave --link out")
        measured = files.read_cluster(options.links)
        if measured.num_ranks != num_ranks:
            raise InputError(
                f"--links {options.links} has {count_text(measured.num_ranks, 'rank')}, but the plan has {num_ranks}; "
                f"measure the links between {num_ranks} ranks"
            )
    elif options.link is None:
        measured = links_here(num_ranks)
    if measured is not None:
        return measured if limit_bytes is None else replace(measured, limit_bytes=(limit_bytes,) * num_ranks)
    return Cluster.uniform(num_ranks, limit_bytes, *(options.link or ()))


def shaped(options: Options, limit_bytes: int | None, links_here: LinksHere) -> Placement:
    """The stages placed in the shape that --shape names, or else in a v."""
    shape_name = options.shape or "v"
    shape = SHAPES[shape_name]
    costs = costs_of(options, shape.per_rank, shape.shared)
    if options.split_backward:
        costs = costs.with_split_backward()
    num_ranks = (costs.num_stages - shape.shared) // shape.per_rank
    cluster = cluster_of(options, num_ranks, limit_bytes, links_here)
    try:
        return shape.place(costs, cluster)
    except PlacementError as error:  # it may name a function that the shape is made by
        raise InputError(f"--shape {shape_name}: {error}") from None
