"""`rota show`."""

from __future__ import annotations

from argparse import Namespace

from rota.cli import files, json_reports
from rota.cli.arguments import add_costs_of_csv, add_json, add_output
from rota.cli.json_reports import print_json
from rota.cli.parser import Command, Parser
from rota.cli.pictures import draw, is_measured
from rota.cli.requirements import InputError, require
from rota.cli.screen import print_timeline, progress_line
from rota.timeline import Timeline


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rota show` to its parser."""
    parser.add_argument(
        "file", help="plan.json (which is simulated first), timeline.json, or a schedule CSV in PyTorch's format"
    )
    add_costs_of_csv(parser)
    add_output(parser, "PICTURE", "write a .png, .svg, .pdf or .html instead, or a .json for Perfetto")
    parser.add_argument("--timeline", metavar="FILE", help="also write the timeline that is shown as JSON")
    parser.set_defaults(written={"output": "file", "timeline": "timeline"})
    parser.add_argument(
        "--above", metavar="FILE", help="with -o: draw a second plan or timeline above the first, on the same time axis"
    )
    parser.add_argument("--bound", action="store_true", help="with -o: show the gap to a proven lower bound")
    add_json(parser)


def run(arguments: Namespace) -> int:
    """Print the timeline in the terminal, or draw it to --output. Returns the exit code."""
    timeline = files.read_timeline(arguments.file, arguments.costs)
    assumed = arguments.costs is None and files.note_assumed_times("show", arguments.file)
    if arguments.above is not None:
        files.note_assumed_times("show", arguments.above)
    if arguments.json:
        print_json({"times_assumed": assumed, **json_reports.of_timeline(timeline)})
    if arguments.output is not None:
        above = None if arguments.above is None else files.read_timeline(arguments.above)
        bound_us = _bound_us(timeline, arguments.file) if arguments.bound else None
        names = (str(arguments.above), arguments.file)
        draw(timeline, arguments.output, above, names, bound_us, quietly=arguments.json)
    elif arguments.above is not None or arguments.bound:
        option = "--bound" if arguments.above is None else f"--above {arguments.above}"
        raise InputError(f"{option} is for pictures; name one with -o, such as -o plan.html")
    elif not arguments.json:
        print_timeline(timeline)
    if arguments.timeline is not None:
        files.write(arguments.timeline, timeline.to_json(), quietly=arguments.json)
    return 0


def _bound_us(timeline: Timeline, name: str) -> int:
    """A lower bound with the plan's own costs. Raises InputError for measured times, which may be below it."""
    if is_measured(timeline):
        raise InputError(
            f"--bound: {name} has measured times, but the bound is for planned times; show the plan instead"
        )
    require("ortools", "search")
    from rota.search import bounds_of

    with progress_line() as show:
        show("computing lower bounds on the makespan …")
        return bounds_of(timeline.plan.placement, timeline.plan.num_microbatches)[0].us


COMMAND = Command("show", "draw a plan or timeline as a chart", "rota show plan.json -o plan.html", add_arguments, run)
