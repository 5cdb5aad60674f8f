"""`rota profile`."""

from __future__ import annotations

import os
import sys
from argparse import Namespace

from rota.cli import files, json_reports
from rota.cli.arguments import add_cache, add_json, add_model_options, add_output, number, rows
from rota.cli.json_reports import print_json
from rota.cli.parser import Command, Parser
from rota.cli.requirements import InputError, require
from rota.cli.screen import print_text, progress_line, report_columns
from rota.layers import LayerCosts
from rota.profiles import Profile
from rota.sizes import SizeModel
from rota.tables import fitted, table_lines
from rota.units import count_text, size_text, time_text

LINKS = "links"
_REPEATS = 7
_TOO_FAR_APART = 1.0  # the interquartile range of the measurements, as a part of their median


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rota profile` to its parser."""
    parser.add_argument(
        "model",
        metavar="MODEL.py",
        help="Python file that defines make_model(), make_batch(rows) and loss_fn; or hf:config.json for a "
        "language model from Hugging Face transformers; or the word links, to measure messages between processes",
    )
    add_model_options(parser)
    help_text = "rows per micro-batch (default: 1; with --lengths: 1,4)"
    parser.add_argument("--rows", type=rows, metavar="N,N,…", help=help_text)
    help_text = "measure at these lengths and fit costs as a function of length, for samples that differ in length"
    parser.add_argument("--lengths", type=rows, metavar="N,N,…", help=help_text)
    help_text = "with --lengths: number of stages to cut the model into (default: 2)"
    parser.add_argument("--stages", type=number(1), metavar="N", help=help_text)
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="device on this machine to measure on, such as cpu or cuda (default: cpu; for links: auto), or "
        "another device, such as h100, whose costs are estimated without running anything",
    )
    help_text = f"measurements, of which the median counts (default: {_REPEATS}; for links: 15)"
    parser.add_argument("--repeats", type=number(1), metavar="N", help=help_text)
    parser.add_argument(
        "--processes",
        type=number(2),
        metavar="N",
        help="for links: number of processes to start on this machine (default: 2)",
    )
    add_cache(parser)
    add_json(parser)
    add_output(parser, "FILE", "write the profile, or the measured links, as JSON")


def run(arguments: Namespace) -> int:
    """Profile the layers of a model, or the links between processes. Returns the exit code."""
    require("torch", "torch")
    return _links(arguments) if arguments.model == LINKS else _layers(arguments)


def _layers(arguments: Namespace) -> int:
    if arguments.processes:
        raise InputError(f"--processes is for `rota profile {LINKS}`; leave it out for {arguments.model}")
    from rota.planning.model_file import load_model_file, profile_file

    if arguments.lengths:
        return _sizes(arguments)
    if arguments.stages:
        raise InputError("--stages is for costs by length: give --lengths as well, such as --lengths 64,128,256")
    how = {"device": arguments.device, "cache": arguments.cache, "refresh": arguments.refresh, "cuts": arguments.cuts}
    repeats = arguments.repeats or _REPEATS
    with progress_line() as show:
        model_file = load_model_file(arguments.model, arguments.length)
        found = profile_file(model_file, arguments.rows or (1,), repeats=repeats, report=show, **how)
    then = f"; plan with `rota autoplan --profile {arguments.output} …`"
    if arguments.json:
        print_json({"layers": [json_reports.of_layers(layers) for layers in found.values()]})
    else:
        _print_layers(arguments, found, repeats)
    files.keep(arguments.output, found.to_json(), then=then, quietly=arguments.json)
    return 0


def _print_layers(arguments: Namespace, found: Profile, repeats: int) -> None:
    """Print what layers cost, and why the figures may be wrong."""
    for layers in found.values():
        print(_summary(layers))
    worst = max((spread for layers in found.values() for spread in layers.spread), default=0.0)
    doubtful = next((layers.why_doubtful for layers in found.values() if layers.why_doubtful), "")
    incomplete = next((layers.why_incomplete for layers in found.values() if layers.uncounted), "")
    if incomplete:
        print_text(f"Costs are too low: {incomplete}.")
    refresh, with_refresh = (" --refresh", ", with --refresh") if arguments.cache else ("", "")
    if worst > _TOO_FAR_APART:
        print_text(
            f"Measurements that vary by {worst:.0%} are too noisy for planning: close other programs, and take more "
            f"measurements, with --repeats {3 * repeats}{refresh}."
        )
    elif doubtful:
        remedy = f"Close other programs, and measure again{with_refresh}."
        print_text(f"The machine was busy, or its speed varied: {doubtful}. {remedy}")


def _sizes(arguments: Namespace) -> int:
    from rota.planning.size_profile import profile_file_sizes

    if len(arguments.lengths) < 2 or arguments.length:
        raise InputError("--lengths needs two lengths or more, such as --lengths 64,128,256, and no --length")
    how = {"device": arguments.device, "cuts": arguments.cuts, "repeats": arguments.repeats or _REPEATS}
    if arguments.cache:
        raise InputError("--cache stores profiles of one length; leave it out with --lengths")
    with progress_line() as show:
        found = profile_file_sizes(
            arguments.model, arguments.lengths, arguments.rows or (1, 4), arguments.stages or 2, report=show, **how
        )
    if arguments.json:
        print_json(json_reports.of_sizes(found.model, found.cuts))
    else:
        print(_sizes_table(found.model))
        cut = f"cut at {', '.join(found.cuts)}" if found.cuts else "not cut"
        print_text(f"{cut}; fitted times differ from measured ones by at most {found.model.error:.1%}")
    then = ", a rota.SizeModel for rota.Planner"
    files.keep(arguments.output, found.model.to_json(), then=then, quietly=arguments.json)
    return 0


def _sizes_table(model: SizeModel) -> str:
    """A row per stage and figure."""
    header = ("stage", "figure", "constant", "per token", "per token²")
    rows = [
        (str(stage), name, *(f"{term:.4g}" for term in curve))
        for stage in range(model.num_stages)
        for name in ("forward_us", "backward_us", "activation_bytes")
        for curve in [getattr(model, name)[stage]]
    ]
    return "\n".join(table_lines(header, rows, left=header, width=report_columns(), optional=("per token²",)))


def _summary(layers: LayerCosts) -> str:
    """The layers as a table, with the numbers and contents that progress and errors give them."""
    header = ("layer", "F", "B", "kept", "static", "contents")
    contents = layers.contents or ("-", *(f"from {cut}" for cut in layers.cuts))
    columns = layers.forward_us, layers.backward_us, layers.kept_bytes, layers.static_bytes, contents
    rows = [
        (str(number), time_text(f_us), time_text(b_us), size_text(kept), size_text(static), held)
        for number, (f_us, b_us, kept, static, held) in enumerate(zip(*columns, strict=True), start=1)
    ]
    lines = table_lines(header, rows, left=header)
    table = "\n".join(fitted(line, report_columns(), lines[0].index("contents")) for line in lines)
    spread = f"; F and B vary by {max(layers.spread):.0%} at most" if any(layers.spread) else ""
    heading = f"{count_text(layers.rows, 'row')} per micro-batch, {layers.note}{spread}"
    return f"{fitted(heading, report_columns())}\n{table}"


def _links(arguments: Namespace) -> int:
    from rota.profiling.links import REPEATS
    from rota.profiling.machine_links import links_of_launched, links_of_started, measured_on_this_machine
    from rota.runtime.device.local import AUTO
    from rota.runtime.environment import device_environment

    for option in ("rows", "cuts", "length", "lengths", "stages"):
        if getattr(arguments, option):
            raise InputError(f"--{option} is for a model; leave it out for {LINKS}")
    repeats = arguments.repeats or REPEATS
    if "RANK" not in os.environ:  # else torchrun, or something like it, has started this process as one of several
        number, device = arguments.processes or 2, arguments.device or AUTO
        if arguments.cache is None:
            found = links_of_started(number, device, repeats, _tell)
        else:
            kept = {"cache": arguments.cache, "refresh": arguments.refresh, "repeats": repeats}
            found = measured_on_this_machine(number, device=device, report=_tell, **kept)
    else:
        for option in ("processes", "cache"):
            if getattr(arguments, option) is not None:
                raise InputError(f"--{option}: the launcher has started the processes; leave it out")
        os.environ |= device_environment(arguments.device) if arguments.device else {}
        of_launched = links_of_launched(repeats, _tell)
        if of_launched is None:  # the first process prints it
            return 0
        found = of_launched
    if arguments.json:
        print_json(found.cluster.to_fields())
    else:
        print_text(found.text)
    then = ", a rota.Cluster for `rota autoplan --links`"
    files.keep(arguments.output, found.cluster.to_json(), then=then, quietly=arguments.json)
    return 0


def _tell(doing: str) -> None:
    """Say what is being measured, apart from what is found: it takes seconds, also where nothing is a terminal."""
    print(f"rota profile links: {doing}", file=sys.stderr, flush=True)


COMMAND = Command(
    "profile",
    "measure (or estimate) the time and memory of each layer of a model, or measure the links between processes",
    "rota profile model.py --rows 1,2,4,8 -o profile.json\n  rota profile links --processes 4 -o cluster.json",
    add_arguments,
    run,
)
