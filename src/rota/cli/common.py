"""Options that several commands have in common."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from rota.cli.command import Choice, Decorator, Output, WholeNumber, combined
from rota.cli.files import WrittenBy
from rota.cli.values import LIMIT, LINK, SECONDS, SIZE, WORDS
from rota.core.costs import ASSUMED_COSTS
from rota.shapes import SHAPES

NATURAL = WholeNumber(min=0)
_LINKS = "all links as set by --link"


class _PathName(click.Path):
    """A path as it is typed: what is wrong with it is said where it is read or written."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002
        """Return the text."""
        return value


#: An argument that is a path, and options that take a path, a number of 1 or more, or nothing.
argument = partial(click.argument, type=_PathName())
file = partial(click.option, type=_PathName(), metavar="FILE")
count = partial(click.option, type=WholeNumber(min=1), metavar="N")
flag = partial(click.option, is_flag=True)

json = flag("--json", help="print the results as JSON instead of text")
force = flag("--force", help="overwrite existing files")


def output(metavar: str, help: str, *, writes: WrittenBy = "file", **settings: Any) -> Decorator[Any]:
    """-o and --force."""
    written = file("-o", "--output", cls=Output, writes=writes, metavar=metavar, help=help, **settings)
    return combined(written, force)


costs_of_csv = file(
    "--costs",
    help="for a schedule CSV, which has no times: costs per stage, from rota.Costs.to_json() or `rota calibrate "
    "--costs` (default: forward 1 ms, backward 2 ms)",
)

length = count(
    "--length",
    help="tokens per row, for Hugging Face models without a make_batch (default: 1024, or the model's maximum if "
    "smaller)",
)

model = combined(
    click.option(
        "--cuts",
        type=WORDS,
        metavar="PATTERN,…",
        help="modules that can start a stage, such as 'transformer.h.*'; none of them may be inside another. In a "
        "model with rota.CutPoint modules, name some of its CutPoints (default: all CutPoints or, if there are none, "
        "the entries of the outermost nn.ModuleList, nn.ModuleDict or nn.Sequential)",
    ),
    length,
)

timeout = click.option(
    "--timeout",
    type=SECONDS,
    metavar="S",
    help="stop a rank after S seconds without progress (default: the time of 20 simulated steps, but at least 60 s)",
)

cache = combined(
    file(
        "--cache",
        metavar="PATH",
        help="file or folder that stores measurements for the next run (default: they are not stored)",
    ),
    flag("--refresh", help="measure again, even if the cache has a result"),
)

limit = click.option("--limit", type=LIMIT, metavar="SIZE", help="memory limit per rank, such as 40GB (default: none)")

snapshots = flag(
    "--snapshots",
    help="for ranks on CPUs: also count the two copies of each rank's state that `rota run --max-restarts` keeps in "
    "memory; with accelerators, they are in the host's memory, to which the limit does not apply",
)


def cores(default: str = "as recorded by the run") -> Decorator[Any]:
    """--cores; `default` says what holds without it."""
    help_text = f"number of CPU cores, if all ranks share one machine (default: {default})"
    return count("--cores", help=help_text)


def time_limit(help: str, default: float | None = None) -> Decorator[Any]:
    """--time-limit."""
    return click.option("--time-limit", type=SECONDS, default=default, metavar="S", help=help)


def costs(links_default: str = _LINKS) -> Decorator[Any]:
    """--ranks, the costs of stages, from a file or uniform, and the links; `links_default` says what is assumed."""
    default = ASSUMED_COSTS
    return combined(
        count(
            "--ranks",
            help="number of ranks (default: one per stage, or as many as the stages need; required if the number of "
            "stages is not given)",
        ),
        file(
            "--costs",
            help="costs per stage, from rota.Costs.to_json() or `rota calibrate --costs` (default: the same for all "
            "stages, as set by the options --forward-us to --boundary)",
        ),
        click.option(
            "--forward-us",
            type=NATURAL,
            metavar="US",
            help=f"forward (F) time in µs per stage (with all: per rank) (default: {default['forward_us']})",
        ),
        click.option(
            "--backward-us",
            type=NATURAL,
            metavar="US",
            help="backward (B) time in µs; with --weight-us, only the time of the input gradient (I) "
            f"(default: {default['backward_us']})",
        ),
        click.option(
            "--weight-us",
            type=NATURAL,
            metavar="US",
            help="weight-gradient (W) time in µs; splits the backward into I and W (default: not split)",
        ),
        click.option(
            "--activation",
            "activation_bytes",
            type=SIZE,
            metavar="BYTES",
            help=f"bytes of activations that F keeps until the backward (default: {default['activation_bytes']})",
        ),
        click.option(
            "--boundary",
            "boundary_bytes",
            type=SIZE,
            metavar="BYTES",
            help="bytes sent from each stage to the next (default: 0)",
        ),
        links(links_default),
    )


def links(default: str = _LINKS) -> Decorator[Any]:
    """--link, the same for all ranks, and --links, from a file; `default` says what is assumed without that file."""
    return combined(
        click.option(
            "--link",
            type=LINK,
            metavar="LINK",
            help="latency and rate of every link, such as 5us,50GB/s (default: transfers take no time)",
        ),
        file(
            "--links",
            help="use measured links from `rota profile links -o cluster.json`, or those of a plan or timeline: "
            f"latency, rate, shared links, all-reduces (default: {default})",
        ),
    )


_SHAPES = "; ".join(f"{name}: {shape.summary}" for name, shape in SHAPES.items())
shape = combined(
    flag(
        "--split-backward",
        help="for search: split the backward into I and W, each with half of the time, unless the costs are already "
        "split",
    ),
    click.option(
        "--shape",
        type=Choice(SHAPES),
        metavar="SHAPE",
        help=f"for search: how the stages are placed on the ranks (default: v); {_SHAPES}",
    ),
)
