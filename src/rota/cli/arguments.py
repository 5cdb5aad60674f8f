"""Arguments that several commands share: their types, the options themselves, and what those of costs mean."""

from __future__ import annotations

import argparse
import re
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction
from typing import TypeVar

from rota.cli import files
from rota.cli.parser import Parser, one_of
from rota.cli.requirements import InputError
from rota.cluster import Cluster
from rota.costs import ASSUMED_COSTS, Costs, assumed_costs
from rota.errors import PlacementError
from rota.placement import Placement
from rota.shapes import SHAPES
from rota.units import count_text

T = TypeVar("T")

_TIMES_US = {"us": 1, "µs": 1, "ms": 1000, "s": 1_000_000}
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY = {"ki": 1024, "mi": 1024**2, "gi": 1024**3, "ti": 1024**4}

# --- types: a text as what it means -----------------------------------------------------------------------------------


def argument_type(parse: Callable[[str], T]) -> Callable[[str], T]:
    """`parse` as an argument's type: argparse shows the message of its ValueError."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def parse_bytes(text: str) -> int:
    """Return bytes: "40GB" -> 40000000000, "512MiB" -> 536870912, "1000" -> 1000. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|[kmgt]i?)b?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write, for example, 40GB or 512MiB")
    number, unit = Fraction(match[1]), match[2]
    if not unit and number.denominator > 1:
        raise ValueError(f"{text!r} is not a whole number of bytes; write, for example, {int(number)}, or {match[1]}GB")
    return int(number * (_UNITS | _BINARY)[unit])  # rounded down: a limit must not be exceeded by a fraction of a byte


def parse_memory(text: str) -> int | Fraction:
    """Return bytes ("40GB", "1000B"), or a share of the device's memory ("80%" -> 4/5). Raises ValueError."""
    share = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if share is not None:
        if not 0 < Fraction(share[1]) <= 100:
            raise ValueError(f"{text!r} must be more than 0% and at most 100%")
        return Fraction(share[1]) / 100
    num_bytes = parse_bytes(text)
    if text.strip()[-1].isdigit():  # the unit was probably forgotten
        raise ValueError(f"{text!r} has no unit; write, for example, {text}GB, or {text}B for bytes")
    return num_bytes


def parse_limit(text: str) -> int:
    """Return bytes, as `parse_memory`, where the device is not known that a share would refer to. Raises ValueError."""
    found = parse_memory(text)
    if isinstance(found, Fraction):
        raise ValueError(
            f"{text!r} is a share of a device's memory, but this command does not know the device; write a size, "
            f"for example 40GB (`rota autoplan --memory` takes shares)"
        )
    return found


def parse_link(text: str) -> tuple[int, int | None]:
    """Return latency in µs and bytes per µs: "5us,50GB/s" -> (5, 50000); either may be left out. Raises ValueError."""
    latency_us: int | None = None
    bytes_per_us: int | None = None
    for part in text.split(","):
        time = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(us|µs|ms|s)\s*", part)
        rate = re.fullmatch(r"\s*(.*)/s\s*", part)
        if rate is not None and rate[1].endswith("b"):
            raise ValueError(
                f"{text!r}: {part!r} is in bits; give the rate in bytes (B), which is one eighth of that number"
            )
        if time is not None and latency_us is None:
            latency_us = round(Fraction(time[1]) * _TIMES_US[time[2]])
        elif (
            rate is not None
            and bytes_per_us is None
            and (per_us := round(Fraction(parse_bytes(rate[1]), 1_000_000))) > 0
        ):
            bytes_per_us = per_us
        else:
            raise ValueError(f"{text!r} is not a link: {part!r} is wrong; write latency and rate, such as 5us,50GB/s")
    return latency_us or 0, bytes_per_us


def parse_mesh(text: str) -> dict[str, int]:
    """Return sizes by dim: "pp=4,dp=2" -> {"pp": 4, "dp": 2}. Raises ValueError."""
    found: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(pp|dp|tp)\s*=\s*([1-9]\d*)\s*", part)
        if match is None or match[1] in found:
            raise ValueError(
                f"{text!r} is not a mesh: {part!r} is wrong; write, for example, pp=4,dp=2,tp=1, each at most once"
            )
        found[match[1]] = int(match[2])
    return found


size = argument_type(parse_bytes)
memory = argument_type(parse_memory)
limit = argument_type(parse_limit)
link = argument_type(parse_link)
mesh = argument_type(parse_mesh)


def number(minimum: int) -> Callable[[str], int]:
    """A whole number of `minimum` or more."""

    @argument_type
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise ValueError(f"{text!r} must be a whole number of {minimum} or more")
        return int(text)

    return parse


def rows(text: str) -> list[int]:
    """Rows per micro-batch, such as 1,2,4."""
    return sorted({number(1)(part.strip()) for part in text.split(",")})


def seconds(text: str) -> float:
    """A time above 0."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds above 0")
    return found


def comma_separated(values: Iterable[int]) -> str:
    """(0, 4, 8) -> "0,4,8", the form of such an argument."""
    return ",".join(map(str, values))


# --- options ----------------------------------------------------------------------------------------------------------


def add_output(
    parser: Parser,
    metavar: str,
    help: str,
    *,
    writes: files.WrittenBy = "file",
    default: str | None = None,
    required: bool = False,
) -> None:
    """-o and --force."""
    parser.add_argument("-o", "--output", metavar=metavar, default=default, required=required, help=help)
    add_force(parser)
    parser.set_defaults(written={"output": writes})


def add_costs_of_csv(parser: Parser) -> None:
    """--costs, for commands that compute times of a schedule CSV."""
    help_text = (
        "for a schedule CSV, which has no times: costs per stage, from rota.Costs.to_json() or `rota calibrate "
        "--costs` (default: forward 1 ms, backward 2 ms)"
    )
    parser.add_argument("--costs", metavar="FILE", help=help_text)


def add_json(parser: Parser) -> None:
    """--json."""
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of text")


def add_force(parser: Parser) -> None:
    """--force."""
    parser.add_argument("--force", action="store_true", help="overwrite existing files")


def add_model_options(parser: Parser) -> None:
    """--cuts and --length."""
    help_text = (
        "modules that can start a stage, such as 'transformer.h.*'; none of them may be inside another. In a model "
        "with rota.CutPoint modules, name some of its CutPoints (default: all CutPoints or, if there are none, the "
        "entries of the outermost nn.ModuleList, nn.ModuleDict or nn.Sequential)"
    )
    parser.add_argument("--cuts", type=lambda text: text.split(","), metavar="PATTERN,…", help=help_text)
    add_length(parser)


def add_length(parser: Parser) -> None:
    """--length."""
    help_text = "tokens per row, for Hugging Face models without a make_batch (default: 1024, or the model's "
    help_text += "maximum if smaller)"
    parser.add_argument("--length", type=number(1), metavar="N", help=help_text)


def add_timeout(parser: Parser) -> None:
    """--timeout, of commands that start ranks."""
    help_text = (
        "stop a rank after S seconds without progress (default: the time of 20 simulated steps, but at least 60 s)"
    )
    parser.add_argument("--timeout", type=seconds, metavar="S", help=help_text)


def add_cache(parser: Parser) -> None:
    """--cache and --refresh."""
    help_text = "file or folder that stores measurements for the next run (default: they are not stored)"
    parser.add_argument("--cache", metavar="PATH", help=help_text)
    parser.add_argument("--refresh", action="store_true", help="measure again, even if the cache has a result")


def add_cores(parser: Parser, default: str = "as recorded by the run") -> None:
    """--cores; `default` tells what holds without it."""
    parser.add_argument(
        "--cores",
        type=number(1),
        metavar="N",
        help=f"number of CPU cores, if all ranks share one machine (default: {default})",
    )


def add_time_limit(parser: Parser, help: str, default: float | None = None) -> None:
    """--time-limit."""
    parser.add_argument("--time-limit", type=seconds, default=default, metavar="S", help=help)


# --- what stages cost, and where they are ----------------------------------------------------------------------------

_UNIFORM = ("forward_us", "backward_us", "weight_us", "activation_bytes", "boundary_bytes")
_LINKS = "all links as set by --link"


def add_step(parser: Parser) -> None:
    """--microbatches and --limit."""
    parser.add_argument("--microbatches", type=number(1), metavar="M", required=True, help="micro-batches per step")
    add_limit(parser)


def add_limit(parser: Parser) -> None:
    """--limit."""
    help_text = "memory limit per rank, such as 40GB (default: none)"
    parser.add_argument("--limit", type=limit, metavar="SIZE", help=help_text)


def add_snapshots(parser: Parser) -> None:
    """--snapshots."""
    help_text = (
        "for ranks on CPUs: also count the two copies of each rank's state that `rota run --max-restarts` keeps in "
        "memory; with accelerators, they are in the host's memory, to which the limit does not apply"
    )
    parser.add_argument("--snapshots", action="store_true", help=help_text)


def add_costs(parser: Parser, of_what: str, links: str = _LINKS) -> None:
    """--ranks, the costs of stages, from a file or uniform, and the links; `links` says what is assumed of them."""
    default = ASSUMED_COSTS
    help_text = (
        "number of ranks (default: one per stage, or as many as the stages need; required if the number of stages is "
        "not given)"
    )
    parser.add_argument("--ranks", type=number(1), metavar="N", help=help_text)
    help_text = (
        "costs per stage, from rota.Costs.to_json() or `rota calibrate --costs` (default: the same for all stages, "
        "as set by the options --forward-us to --boundary)"
    )
    parser.add_argument("--costs", metavar="FILE", help=help_text)
    parser.add_argument(
        "--forward-us",
        type=number(0),
        metavar="US",
        help=f"forward (F) time in µs per {of_what} (default: {default['forward_us']})",
    )
    help_text = "backward (B) time in µs; with --weight-us, only the time of the input gradient (I) "
    help_text += f"(default: {default['backward_us']})"
    parser.add_argument("--backward-us", type=number(0), metavar="US", help=help_text)
    parser.add_argument(
        "--weight-us",
        type=number(0),
        metavar="US",
        help="weight-gradient (W) time in µs; splits the backward into I and W (default: not split)",
    )
    help_text = f"bytes of activations that F keeps until the backward (default: {default['activation_bytes']})"
    parser.add_argument("--activation", type=size, metavar="BYTES", dest="activation_bytes", help=help_text)
    parser.add_argument(
        "--boundary",
        type=size,
        metavar="BYTES",
        dest="boundary_bytes",
        help="bytes sent from each stage to the next (default: 0)",
    )
    add_links(parser, links)


def add_links(parser: Parser, default: str = _LINKS) -> None:
    """The links: the same for all ranks, or from a file; `default` says what is assumed without that file."""
    help_text = "latency and rate of every link, such as 5us,50GB/s (default: transfers take no time)"
    parser.add_argument("--link", type=link, metavar="LINK", help=help_text)
    help_text = (
        "use measured links from `rota profile links -o cluster.json`, or those of a plan or timeline: latency, rate, "
        f"shared links, cost per message (default: {default})"
    )
    parser.add_argument("--links", metavar="FILE", help=help_text)


def add_shape(parser: Parser, group: str) -> None:
    """--split-backward and --shape, in a group of the help."""
    options = parser.add_argument_group(group)
    options.add_argument(
        "--split-backward",
        action="store_true",
        help="split the backward into I and W, each with half of the time, unless the costs are already split",
    )
    summaries = "; ".join(f"{name}: {shape.summary}" for name, shape in SHAPES.items())
    options.add_argument(
        "--shape",
        type=one_of(SHAPES, "--shape"),
        choices=SHAPES,
        metavar="SHAPE",
        help=f"how the stages are placed on the ranks (default: v); {summaries}",
    )


def costs_of(arguments: Namespace, stages_per_rank: int = 1, further_stages: int = 0) -> Costs:
    """The costs in the file, or uniform ones for --stages stages or as many as the ranks need."""
    if arguments.costs is not None:
        if arguments.stages is not None:
            both = f"--stages {arguments.stages} and --costs {arguments.costs}"
            raise InputError(f"{both}: the file already defines the stages; leave --stages out")
        costs = measured(arguments)
        return costs.with_snapshots() if getattr(arguments, "snapshots", False) else costs
    if getattr(arguments, "snapshots", False):
        raise InputError(
            "--snapshots needs --costs FILE with the sizes of the stages' states, which rota.profile measures"
        )
    if not (arguments.stages or arguments.ranks):
        raise InputError("how many stages? give --ranks, --stages or --costs")
    return uniform(arguments, arguments.stages or arguments.ranks * stages_per_rank + further_stages)


def measured(arguments: Namespace) -> Costs:
    """The costs in the file. Raises InputError if options give costs as well."""
    for name in _UNIFORM:
        if getattr(arguments, name) is not None:
            option = "--" + name.removesuffix("_bytes").replace("_", "-")
            raise InputError(
                f"{option} and --costs {arguments.costs}: the file already has all costs; leave {option} out"
            )
    return files.read_costs(arguments.costs)


def uniform(arguments: Namespace, num_stages: int) -> Costs:
    """The costs that the options give, the same for every stage."""
    given = {name: getattr(arguments, name) for name in _UNIFORM if getattr(arguments, name) is not None}
    return assumed_costs(num_stages, **given)


def cluster_of(arguments: Namespace, num_ranks: int, limit_bytes: int | None) -> Cluster:
    """The cluster of `--ranks` ranks, or else of `num_ranks`, with the links of `--links` or the same ones for all.

    Where no option says what links are, `arguments.links_of` may know those of this machine.
    """
    num_ranks = arguments.ranks or max(num_ranks, 1)
    measured = None
    if arguments.links is not None:
        if arguments.link is not None:
            raise InputError(f"--links {arguments.links} has all links; leave --link out")
        measured = files.read_cluster(arguments.links)
        if measured.num_ranks != num_ranks:
            there = count_text(measured.num_ranks, "rank")
            raise InputError(
                f"--links {arguments.links} has {there}, but the plan has {num_ranks}; measure the links between "
                f"{num_ranks} ranks"
            )
    elif arguments.link is None:
        links_of: Callable[[int], Cluster | None] = getattr(arguments, "links_of", lambda _: None)
        measured = links_of(num_ranks)
    if measured is not None:
        return measured if limit_bytes is None else replace(measured, limit_bytes=(limit_bytes,) * num_ranks)
    return Cluster.uniform(num_ranks, limit_bytes, *(arguments.link or ()))


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
