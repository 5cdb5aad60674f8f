"""`rota simulate`."""

from __future__ import annotations

from argparse import Namespace

from rota import simulation
from rota.cli import files, json_reports
from rota.cli.arguments import add_costs_of_csv, add_json, add_output
from rota.cli.json_reports import print_json
from rota.cli.parser import Command, Parser
from rota.cli.screen import print_timeline


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rota simulate` to its parser."""
    parser.add_argument(
        "plan",
        help="plan.json, or a schedule CSV in PyTorch's format",
    )
    add_costs_of_csv(parser)
    add_json(parser)
    add_output(parser, "FILE", "write the timeline as JSON", writes="timeline")


def run(arguments: Namespace) -> int:
    """Simulate the plan, print its timeline, and write it to --output. Returns the exit code."""
    timeline = simulation.simulate(files.read_plan(arguments.plan, arguments.costs))
    assumed = arguments.costs is None and files.note_assumed_times("simulate", arguments.plan)
    if arguments.json:
        print_json({"times_assumed": assumed, **json_reports.of_timeline(timeline)})
    else:
        print_timeline(timeline)
    if arguments.output is not None:
        files.write(arguments.output, timeline.to_json(), quietly=arguments.json)
    return 0


COMMAND = Command(
    "simulate",
    "compute a plan's timeline from its planned times",
    "rota simulate plan.json -o timeline.json",
    add_arguments,
    run,
)
