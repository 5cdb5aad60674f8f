"""Plans that commands make: what stages cost and where they are, as options say, and searches with their progress."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rota.cli import files
from rota.cli.command import Options
from rota.cli.requirements import InputError, require_search
from rota.cli.screen import progress_line
from rota.core.cluster import Cluster
from rota.core.costs import Costs, assumed_costs
from rota.core.errors import PlacementError
from rota.core.placement import Placement
from rota.core.text import count_text, size_text
from rota.shapes import SHAPES

if TYPE_CHECKING:
    from rota.search import Frontier, SearchResult
    from rota.search.result import Objective

#: Instead of a schedule's name: search for the best order.
SEARCH = "search"
STARTING = "starting (the first search on a machine compiles for some seconds)"

_UNIFORM = ("forward_us", "backward_us", "weight_us", "activation_bytes", "boundary_bytes")


def costs_of(options: Options, stages_per_rank: int = 1, further_stages: int = 0) -> Costs:
    """The costs in the file, or uniform ones for --stages stages or as many as the ranks need."""
    if options.costs is not None:
        if options.stages is not None:
            both = f"--stages {options.stages} and --costs {options.costs}"
            raise InputError(f"{both}: the file already defines the stages; leave --stages out")
        return measured(options)
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


def cluster_of(options: Options, num_ranks: int, limit_bytes: int | None) -> Cluster:
    """The cluster of `--ranks` ranks, or else of `num_ranks`, with the links of `--links` or the same ones for all."""
    num_ranks = options.ranks or max(num_ranks, 1)
    if options.links is None:
        return Cluster.uniform(num_ranks, limit_bytes, *(options.link or ()))
    if options.link is not None:
        raise InputError(f"--links {options.links} has all links; leave --link out")
    cluster = files.read_cluster(options.links)
    if cluster.num_ranks != num_ranks:
        raise InputError(
            f"--links {options.links} has {count_text(cluster.num_ranks, 'rank')}, but the plan has {num_ranks}; "
            f"measure the links between {num_ranks} ranks"
        )
    return cluster if limit_bytes is None else replace(cluster, limit_bytes=(limit_bytes,) * num_ranks)


def shaped(options: Options, limit_bytes: int | None) -> Placement:
    """The stages placed in the shape that --shape names, or else in a v."""
    shape_name = options.shape or "v"
    shape = SHAPES[shape_name]
    costs = costs_of(options, shape.per_rank, shape.shared)
    if options.split_backward:
        costs = costs.with_split_backward()
    cluster = cluster_of(options, (costs.num_stages - shape.shared) // shape.per_rank, limit_bytes)
    try:
        return shape.place(costs, cluster)
    except PlacementError as error:  # it may name a function that the shape is made by
        raise InputError(f"--shape {shape_name}: {error}") from None


def search_plan(
    placement: Placement, num_microbatches: int, time_limit_s: float | None, objective: Objective = "makespan"
) -> SearchResult:
    """The best plan that `find_plan` finds; a `time_limit_s` of None means 10."""
    require_search()
    from rota.search import find_plan

    with progress_line(STARTING) as show:
        return find_plan(
            placement, num_microbatches, objective=objective, time_limit_s=time_limit_s or 10.0, progress=show
        )


def search_frontier(placement: Placement, time_limit_s: float | None) -> Frontier:
    """The curve that `find_frontier` finds; a `time_limit_s` of None means 60."""
    require_search()
    from rota.search import Point, find_frontier

    with progress_line(STARTING) as show:

        def show_point(point: Point) -> None:
            us = float(point.us_per_microbatch)
            show(f"{size_text(point.limit_bytes)} per rank: {us:,.1f} µs per micro-batch")

        return find_frontier(placement, time_limit_s=time_limit_s or 60.0, progress=show_point)
