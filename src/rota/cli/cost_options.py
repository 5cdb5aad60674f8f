"""--costs, --forward-us, --shape …: the options for the costs and the placement of stages."""

from __future__ import annotations

from argparse import Namespace

from rota.cli import input_files
from rota.cli.arguments import number, size
from rota.cli.parser import Parser, one_of
from rota.cli.requirements import InputError
from rota.costs import ASSUMED_COSTS, Cluster, Costs, assumed_costs
from rota.errors import PlacementError
from rota.placement import Placement
from rota.shapes import SHAPES

_UNIFORM = ("forward_us", "backward_us", "weight_us", "activation_bytes", "boundary_bytes")


def add_step(parser: Parser) -> None:
    """--microbatches and --limit."""
    parser.add_argument("--microbatches", type=number(1), required=True, help="micro-batches per step")
    parser.add_argument("--limit", type=size, help="memory of each rank, such as 40GB (default: none)")


def add_costs(parser: Parser, of_what: str) -> None:
    """--ranks, the costs of stages, from a file or uniform, and the links."""
    default = ASSUMED_COSTS
    parser.add_argument("--ranks", type=number(1), help="processes (default: one per stage of --costs)")
    parser.add_argument("--costs", metavar="FILE", help="measured costs, written by Costs.to_json()")
    parser.add_argument("--forward-us", type=number(0), help=f"F of {of_what} (default: {default['forward_us']})")
    help_text = f"B, or I with --weight-us (default: {default['backward_us']})"
    parser.add_argument("--backward-us", type=number(0), help=help_text)
    parser.add_argument("--weight-us", type=number(0), help="W: splits the backward into I and W")
    help_text = f"kept by F until the backward (default: {default['activation_bytes']})"
    parser.add_argument("--activation", type=size, dest="activation_bytes", help=help_text)
    parser.add_argument("--boundary", type=size, dest="boundary_bytes", help="sent from stage to stage (default: 0)")
    parser.add_argument("--latency-us", type=number(0), default=0, help="of every link (default: 0)")
    parser.add_argument("--bytes-per-us", type=number(1), help="rate of every link; 1 GB/s is 1000 (default: any)")


def add_shape(parser: Parser, *, group: str | None = None, default: str | None = None) -> None:
    """--split-backward and --shape."""
    options = parser if group is None else parser.add_argument_group(group)
    options.add_argument(
        "--split-backward", action="store_true", help="halve the backward into I and W where the costs do not split it"
    )
    summaries = "; ".join(f"{name}: {shape.summary}" for name, shape in SHAPES.items())
    options.add_argument(
        "--shape",
        type=one_of(SHAPES, "--shape"),
        choices=SHAPES,
        default=default,
        help=f"placement (default: v); {summaries}",
    )


def costs_of(arguments: Namespace, stages_per_rank: int = 1, further_stages: int = 0) -> Costs:
    """The costs in the file, or uniform ones for --stages stages or as many as the ranks need."""
    if arguments.costs is not None:
        if arguments.stages is not None:
            raise InputError(f"--stages {arguments.stages} and --costs {arguments.costs}: the file has the stages")
        return measured(arguments)
    if not (arguments.stages or arguments.ranks):
        raise InputError("how many stages? give --ranks, --stages or --costs")
    return uniform(arguments, arguments.stages or arguments.ranks * stages_per_rank + further_stages)


def measured(arguments: Namespace) -> Costs:
    """The costs in the file. Raises InputError if options give costs as well."""
    for name in _UNIFORM:
        if getattr(arguments, name) is not None:
            option = "--" + name.removesuffix("_bytes").replace("_", "-")
            raise InputError(f"{option} and --costs {arguments.costs}: the file has them; leave {option} out")
    return input_files.read_costs(arguments.costs)


def uniform(arguments: Namespace, num_stages: int) -> Costs:
    """The costs that the options give, the same for every stage."""
    given = {name: getattr(arguments, name) for name in _UNIFORM if getattr(arguments, name) is not None}
    return assumed_costs(num_stages, **given)


def cluster_of(arguments: Namespace, num_ranks: int, limit_bytes: int | None) -> Cluster:
    """The cluster of `--ranks` ranks, or else of `num_ranks`."""
    return Cluster.uniform(
        arguments.ranks or max(num_ranks, 1), limit_bytes, arguments.latency_us, arguments.bytes_per_us
    )


def shaped(arguments: Namespace, limit_bytes: int | None) -> Placement:
    """The stages placed in the shape that --shape names."""
    shape = SHAPES[arguments.shape]
    costs = costs_of(arguments, shape.per_rank, shape.shared)
    if arguments.split_backward:
        costs = costs.with_split_backward()
    num_ranks = (costs.num_stages - shape.shared) // shape.per_rank
    cluster = cluster_of(arguments, num_ranks, limit_bytes)
    try:
        return shape.place(costs, cluster)
    except PlacementError as error:  # it may name a function that the shape is made by
        raise InputError(f"--shape {arguments.shape}: {error}") from None
