"""`rota explain`."""

from __future__ import annotations

import json
from argparse import Namespace

from rota import accounting
from rota.cli import files
from rota.cli.arguments import add_cores, add_json
from rota.cli.json_reports import print_json
from rota.cli.parser import Command, Parser
from rota.cli.pictures import is_measured
from rota.cli.screen import print_wire_effects, progress_line, report_columns
from rota.cli.wire_effects import free_text, wire_effects


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rota explain` to its parser."""
    parser.add_argument("timeline", help="timeline.json, or a plan (which is simulated first)")
    help_text = "plan that has the expected op times (default: the timeline's own plan)"
    parser.add_argument("--planned", metavar="FILE", help=help_text)
    add_cores(parser)
    add_json(parser)


def run(arguments: Namespace) -> int:
    """Print why each rank is idle, as text or JSON. Returns the exit code."""
    timeline = files.read_timeline(arguments.timeline)
    planned = None if arguments.planned is None else files.read_timeline(arguments.planned)
    with progress_line() as show:
        show("simulating what would help …")
        explanation = accounting.explain(timeline, planned, arguments.cores)
    if is_measured(timeline):
        files.note_one_step("explain", arguments.timeline)
    given = [path for path in (arguments.timeline, arguments.planned) if path is not None]
    assumed = files.note_assumed_times("explain", *given)
    if arguments.json:
        effects = wire_effects(timeline.plan.placement)
        print_json({"times_assumed": assumed, "wire_effects": effects, **json.loads(explanation.to_json())})
    else:
        print(explanation.to_text(report_columns()))
        print_wire_effects(timeline.plan, report_columns(), free_text(timeline.num_ranks, explanation.num_cores))
    return 0


COMMAND = Command(
    "explain",
    "show why ranks are idle, largest causes first, and what would help",
    "rota explain timeline.json",
    add_arguments,
    run,
)
