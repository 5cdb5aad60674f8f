"""`rota profile`."""

from __future__ import annotations

import os
from argparse import Namespace

from rota.cli import files
from rota.cli.arguments import add_model_options, add_output, number, rows
from rota.cli.parser import Command, Parser
from rota.cli.requirements import InputError, require
from rota.cli.screen import progress_line
from rota.costs import Cluster
from rota.layers import LayerCosts
from rota.units import count_text, size_text, time_text

LINKS = "links"
_REPEATS = 7
_TOO_FAR_APART = 1.0  # the middle half of the measurements, as a part of their median


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rota profile` to its parser."""
    parser.add_argument(
        "model",
        metavar="MODEL.py",
        help="file that defines make_model, make_batch, loss_fn; or hf:config.json, a language model of transformers; "
        "or links, for the speed of messages between processes",
    )
    add_model_options(parser)
    parser.add_argument("--rows", type=rows, metavar="N,N,…", help="rows of a micro-batch (default: 1)")
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="cpu, cuda or another of this machine's to measure there (default: cpu; for links: auto), or one to "
        "estimate for, such as h100, computing nothing",
    )
    help_text = f"of each measurement, of which the median counts (default: {_REPEATS})"
    parser.add_argument("--repeats", type=number(1), metavar="N", help=help_text)
    parser.add_argument("--processes", type=number(2), help="for links: to start on this machine (default: 2)")
    parser.add_argument("--cache", metavar="PATH", help="file or folder that keeps what was measured")
    parser.add_argument("--refresh", action="store_true", help="measure again what the cache has")
    add_output(parser, "FILE", "write the profile, or the cluster, as JSON")


def run(arguments: Namespace) -> int:
    """Profile the layers of a model, or the links between processes. Returns the exit code."""
    require("torch", "torch")
    return _links(arguments) if arguments.model == LINKS else _layers(arguments)


def _layers(arguments: Namespace) -> int:
    if arguments.processes is not None:
        raise InputError(f"--processes is for `rota profile {LINKS}`; leave it out for {arguments.model}")
    from rota.planning.model_file import load_model_file, profile_file

    how = {"device": arguments.device, "cache": arguments.cache, "refresh": arguments.refresh, "cuts": arguments.cuts}
    repeats = arguments.repeats or _REPEATS
    with progress_line() as show:
        model_file = load_model_file(arguments.model, arguments.length)
        found = profile_file(model_file, arguments.rows or (1,), repeats=repeats, report=show, **how)
    for layers in found.values():
        print(_summary(layers))
    worst = max((spread for layers in found.values() for spread in layers.spread), default=0.0)
    if worst > _TOO_FAR_APART:
        refresh = " --refresh" if arguments.cache else ""
        print(
            f"Measurements that vary by {worst:.0%} are too noisy for planning: close other programs, and measure more "
            f"often, by --repeats {3 * repeats}{refresh}."
        )
    then = f"; plan with it by `rota autoplan --profile {arguments.output} …`"
    files.keep(arguments.output, found.to_json(), then=then)
    return 0


def _summary(layers: LayerCosts) -> str:
    """The layers as a table."""
    header = ("layer", "F", "B", "kept", "static", "ends at")
    ends = (*layers.cuts, "-")
    columns = layers.forward_us, layers.backward_us, layers.kept_bytes, layers.static_bytes, ends
    rows = [
        (str(i), time_text(f_us), time_text(b_us), size_text(kept), size_text(static), end)
        for i, (f_us, b_us, kept, static, end) in enumerate(zip(*columns, strict=True))
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    table = "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in (header, *rows))
    spread = f"; F and B vary by {max(layers.spread):.0%} at most" if any(layers.spread) else ""
    return f"{count_text(layers.rows, 'row')} per micro-batch, {layers.note}{spread}\n{table}"


def _links(arguments: Namespace) -> int:
    from rota.profiling import link_processes
    from rota.runtime.device.local import AUTO, device_environment

    for option in ("rows", "repeats", "cache", "refresh", "cuts", "length"):
        if getattr(arguments, option):
            raise InputError(f"--{option} is for a model; leave it out for {LINKS}")
    if not link_processes.is_launched():
        device = arguments.device or AUTO
        cluster: Cluster | None = link_processes.links_of_started(arguments.processes or 2, device, print)
    elif arguments.processes is not None:
        raise InputError("--processes: the launcher has started them; leave it out")
    else:
        os.environ |= device_environment(arguments.device) if arguments.device else {}
        cluster = link_processes.links_of_launched(print)
    if cluster is None:  # the first process prints it
        return 0
    pairs = [(a, b) for b in range(cluster.num_ranks) for a in range(b)]
    for a, b in pairs:
        there, back = cluster.link_between(a, b), cluster.link_between(b, a)
        for name, link in ((f"{a} - {b}", there),) if there == back else ((f"{a} → {b}", there), (f"{b} → {a}", back)):
            print(f"{name}: {time_text(link.latency_us)}, {size_text((link.bytes_per_us or 0) * 1_000_000)}/s")
    files.keep(arguments.output, cluster.to_json(), then="; it is a rota.Cluster: Cluster.from_json reads it")
    return 0


COMMAND = Command(
    "profile",
    "time and memory of each layer of a model, measured here or estimated for a device; or the speed of links",
    "rota profile model.py --rows 1,2,4,8 -o profile.json\n  rota profile links --processes 4 -o cluster.json",
    add_arguments,
    run,
)
