"""Options that several commands have in common, and the types of options' values: a text as what it means."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import partial
from typing import Any

import click

from rota.cli.command import Choice, Decorator, Output, Value, WholeNumber, combined
from rota.cli.files import WrittenBy
from rota.core.costs import ASSUMED_COSTS
from rota.shapes import SHAPES

# --- types: each raises ValueError with the remedy --------------------------------------------------------------------

_TIMES_US = {"us": 1, "µs": 1, "ms": 1000, "s": 1_000_000}
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY = {"ki": 1024, "mi": 1024**2, "gi": 1024**3, "ti": 1024**4}


def parse_bytes(text: str) -> int:
    """Return bytes: "40GB" -> 40000000000, "512MiB" -> 536870912, "1000" -> 1000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|[kmgt]i?)b?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write, for example, 40GB or 512MiB")
    number, unit = Fraction(match[1]), match[2]
    if not unit and number.denominator > 1:
        raise ValueError(f"{text!r} is not a whole number of bytes; write, for example, {int(number)}, or {match[1]}GB")
    return int(number * (_UNITS | _BINARY)[unit])  # rounded down: a limit must not be exceeded by a fraction of a byte


def parse_limit(text: str) -> int:
    """Return bytes: "40GB", "1000B"."""
    num_bytes = parse_bytes(text)
    if text.strip()[-1].isdigit():  # the unit was probably forgotten
        raise ValueError(f"{text!r} has no unit; write, for example, {text}GB, or {text}B for bytes")
    return num_bytes


def parse_memory(text: str) -> int | Fraction:
    """Return bytes, as `parse_limit`, or a share of the device's memory ("80%" -> 4/5)."""
    share = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if share is None:
        return parse_limit(text)
    if not 0 < Fraction(share[1]) <= 100:
        raise ValueError(f"{text!r} must be more than 0% and at most 100%")
    return Fraction(share[1]) / 100


def parse_link(text: str) -> tuple[int, int | None]:
    """Return latency in µs and bytes per µs: "5us,50GB/s" -> (5, 50000); either may be left out."""
    latency_us: int | None = None
    bytes_per_us: int | None = None
    for part in text.split(","):
        time = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(us|µs|ms|s)\s*", part)
        rate = re.fullmatch(r"\s*(.*)/s\s*", part)
        if rate is not None and rate[1].endswith("b"):
            raise ValueError(
                f"{text!r}: {part!r} is in bits; give the rate in bytes (B), which is one eighth of that number"
            )
        per_us = 0 if rate is None else round(Fraction(parse_bytes(rate[1]), 1_000_000))
        if time is not None and latency_us is None:
            latency_us = round(Fraction(time[1]) * _TIMES_US[time[2]])
        elif bytes_per_us is None and per_us > 0:
            bytes_per_us = per_us
        else:
            raise ValueError(f"{text!r} is not a link: {part!r} is wrong; write latency and rate, such as 5us,50GB/s")
    return latency_us or 0, bytes_per_us


def parse_mesh(text: str) -> dict[str, int]:
    """Return sizes by dim: "pp=4,dp=2" -> {"pp": 4, "dp": 2}."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(pp|dp|tp)\s*=\s*([1-9]\d*)\s*", part)
        if match is None or match[1] in sizes:
            raise ValueError(
                f"{text!r} is not a mesh: {part!r} is wrong; write, for example, pp=4,dp=2,tp=1, each at most once"
            )
        sizes[match[1]] = int(match[2])
    return sizes


def parse_words(text: str) -> list[str]:
    """Return the words between commas."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise ValueError(f"{text!r} has an empty entry; write, for example, a,b")
    return words


def parse_counts(text: str) -> list[int]:
    """Return counts in ascending order: "4,1,2" -> [1, 2, 4]."""
    words = parse_words(text)
    for word in words:
        if not word.isdecimal() or int(word) < 1:
            raise ValueError(f"{word!r} must be a whole number of 1 or more")
    return sorted({*map(int, words)})


# --- options by what they take ----------------------------------------------------------------------------------------

argument = partial(click.argument, type=click.Path())
file = partial(click.option, type=click.Path(), metavar="FILE")
flag = partial(click.option, is_flag=True)
count = partial(click.option, type=WholeNumber(min=1), metavar="N")
counts = partial(click.option, type=Value("counts", parse_counts), metavar="N,N,…")
natural = partial(click.option, type=WholeNumber(min=0), metavar="N")
micros = partial(click.option, type=WholeNumber(min=0), metavar="US")
seconds = partial(click.option, type=click.FloatRange(min=0, max=1e9, min_open=True), metavar="S")
size = partial(click.option, type=Value("size", parse_bytes), metavar="BYTES")
link = partial(click.option, type=Value("link", parse_link), metavar="LINK")

# --- options of several commands --------------------------------------------------------------------------------------

cores = count(
    "--cores", help="number of CPU cores, if all ranks share one machine (default: as the run recorded, if at all)"
)
json = flag("--json", help="print the results as JSON instead of text")
force = flag("--force", help="overwrite existing files")
time_limit = partial(seconds, "--time-limit")
cuts = partial(click.option, "--cuts", type=Value("words", parse_words))


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
    cuts(
        metavar="PATTERN,…",
        help="modules that can start a stage, such as 'transformer.h.*'; none of them may be inside another. In a "
        "model with rota.CutPoint modules, name some of its CutPoints (default: all CutPoints or, if there are none, "
        "the entries of the outermost nn.ModuleList, nn.ModuleDict or nn.Sequential)",
    ),
    length,
)

timeout = seconds(
    "--timeout",
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

limit = click.option(
    "--limit",
    type=Value("limit", parse_limit),
    metavar="SIZE",
    help="memory limit per rank, such as 40GB (default: none)",
)

links = combined(
    link("--link", help="latency and rate of every link, such as 5us,50GB/s (default: transfers take no time)"),
    file(
        "--links",
        help="use measured links from `rota profile links -o cluster.json`, or those of a plan or timeline: latency, "
        "rate, shared links, all-reduces (default: all links as set by --link)",
    ),
)

#: --ranks, the costs of stages, from a file or uniform, and the links.
costs = combined(
    count(
        "--ranks",
        help="number of ranks (default: one per stage, or as many as the stages need; required if the number of stages "
        "is not given)",
    ),
    file(
        "--costs",
        help="costs per stage, from rota.Costs.to_json() or `rota calibrate --costs` (default: the same for all "
        "stages, as set by the options --forward-us to --boundary)",
    ),
    micros(
        "--forward-us",
        help=f"forward (F) time in µs per stage (with all: per rank) (default: {ASSUMED_COSTS['forward_us']})",
    ),
    micros(
        "--backward-us",
        help="backward (B) time in µs; with --weight-us, only the time of the input gradient (I) "
        f"(default: {ASSUMED_COSTS['backward_us']})",
    ),
    micros("--weight-us", help="weight-gradient (W) time in µs; splits the backward into I and W (default: not split)"),
    size(
        "--activation",
        "activation_bytes",
        help=f"bytes of activations that F keeps until the backward (default: {ASSUMED_COSTS['activation_bytes']})",
    ),
    size("--boundary", "boundary_bytes", help="bytes sent from each stage to the next (default: 0)"),
    links,
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
