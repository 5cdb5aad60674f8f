"""`rota profile`."""

from __future__ import annotations

import os

import click

from rota.cli import common, files, reports
from rota.cli.command import Options, WholeNumber, command
from rota.cli.reports import print_json
from rota.cli.requirements import InputError, require
from rota.cli.screen import note, print_text, progress_line, report_columns
from rota.core import reading
from rota.core.layers import LayerCosts, Profile
from rota.core.sizes import SizeModel
from rota.core.text import count_text, fitted, size_text, table_lines, time_text

LINKS = "links"
_REPEATS = 7


@command("rota profile model.py --rows 1,2,4,8 -o profile.json\nrota profile links --processes 4 -o cluster.json")
@common.argument(
    "model",
    metavar="MODEL.py",
    help="Python file that defines make_model(), make_batch(rows) and loss_fn; or hf:config.json for a language model "
    "from Hugging Face transformers; or the word links, to measure messages between processes",
)
@common.model
@common.counts("--rows", help="rows per micro-batch (default: 1; with --lengths: 1,4)")
@common.counts(
    "--lengths",
    help="measure at these lengths and fit costs as a function of length, for samples that differ in length",
)
@common.count("--stages", help="with --lengths: number of stages to cut the model into (default: 2)")
@click.option(
    "--device",
    metavar="NAME",
    help="device on this machine to measure on, such as cpu or cuda (default: cpu; for links: auto), or another "
    "device, such as h100, whose costs are estimated without running anything",
)
@common.count("--repeats", help=f"measurements, of which the median counts (default: {_REPEATS}; for links: 15)")
@common.count(
    "--processes", type=WholeNumber(min=2), help="for links: number of processes to start on this machine (default: 2)"
)
@common.cache
@common.json
@common.output("FILE", "write the profile, or the measured links, as JSON")
def profile(options: Options) -> None:
    """Measure (or estimate) the time and memory of each layer of a model, or measure the links between processes."""
    require("torch", "torch")
    (_links if options.model == LINKS else _layers)(options)


def _layers(options: Options) -> None:
    if options.processes:
        raise InputError(f"--processes is for `rota profile {LINKS}`; leave it out for {options.model}")
    from rota.planning.model_file import load_model_file, profile_file
    from rota.planning.request import Measuring

    if options.lengths:
        _sizes(options)
        return
    if options.stages:
        raise InputError("--stages is for costs by length: give --lengths as well, such as --lengths 64,128,256")
    how = Measuring(options.device, options.repeats or _REPEATS, options.cache, options.refresh, options.cuts)
    with progress_line() as show:
        model_file = load_model_file(options.model, options.length)
        profile = profile_file(model_file, options.rows or (1,), how, show)
    then = f"; plan with `rota autoplan --profile {options.output} …`"
    if options.json:
        print_json({"layers": [reports.of_layers(layers) for layers in profile.values()]})
    else:
        _print_layers(profile)
    files.keep(options.output, profile.to_json(), then=then, quietly=options.json)


def _print_layers(profile: Profile) -> None:
    """Print what layers cost, and why the figures may be wrong."""
    for layers in profile.values():
        print(_summary(layers))
    if incomplete := next((layers.why_incomplete for layers in profile.values() if layers.uncounted), ""):
        print_text(f"Costs are too low: {incomplete}.")
    if doubtful := next((layers.why_doubtful for layers in profile.values() if layers.why_doubtful), ""):
        remedy = "Close other programs, and measure again, with more --repeats (and --refresh, if there is a cache)."
        print_text(f"The machine was busy, or its speed varied: {doubtful}. {remedy}")


def _sizes(options: Options) -> None:
    from rota.planning.model_file import profile_file_sizes
    from rota.planning.request import Measuring

    if len(options.lengths) < 2 or options.length:
        raise InputError("--lengths needs two lengths or more, such as --lengths 64,128,256, and no --length")
    if options.cache:
        raise InputError("--cache stores profiles of one length; leave it out with --lengths")
    how = Measuring(options.device, options.repeats or _REPEATS, cuts=options.cuts)
    with progress_line() as show:
        measured = profile_file_sizes(
            options.model, options.lengths, options.rows or (1, 4), options.stages or 2, how, show
        )
    if options.json:
        print_json(reports.of_sizes(measured.model, measured.cuts))
    else:
        print(_sizes_table(measured.model))
        cut = f"cut at {', '.join(measured.cuts)}" if measured.cuts else "not cut"
        print_text(f"{cut}; fitted times differ from measured ones by at most {measured.model.error:.1%}")
    then = ", a rota.SizeModel for rota.Planner"
    files.keep(options.output, measured.model.to_json(), then=then, quietly=options.json)


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


def _links(options: Options) -> None:
    from rota.profiling.links import REPEATS, links_of_launched
    from rota.profiling.machine_links import links_of_started, links_of_this_machine
    from rota.runtime.device.local import AUTO
    from rota.runtime.environment import DEVICE

    for option in ("rows", "cuts", "length", "lengths", "stages"):
        if getattr(options, option):
            raise InputError(f"--{option} is for a model; leave it out for {LINKS}")
    repeats = options.repeats or REPEATS
    if "RANK" not in os.environ:  # else torchrun, or something like it, has started this process as one of several
        num_processes, device = options.processes or 2, options.device or AUTO
        if options.cache is None:
            links = links_of_started(num_processes, device, repeats, _report)
        else:
            how = {"cache": options.cache, "refresh": options.refresh, "repeats": repeats}
            links = links_of_this_machine(num_processes, device=device, report=_report, **how)
    else:
        for option in ("processes", "cache"):
            if getattr(options, option) is not None:
                raise InputError(f"--{option}: the launcher has started the processes; leave it out")
        os.environ |= {DEVICE: options.device} if options.device else {}
        launched = links_of_launched(repeats, _report)
        if launched is None:  # the first process prints it
            return
        links = launched
    if options.json:
        print_json(reading.to_fields(links.cluster.to_file()))
    else:
        print_text(links.text)
    then = ", a rota.Cluster for `rota autoplan --links`"
    files.keep(options.output, links.cluster.to_json(), then=then, quietly=options.json)


def _report(doing: str) -> None:
    """Say what is being measured, apart from what is found: it takes seconds, also where nothing is a terminal."""
    note("profile links", doing)
