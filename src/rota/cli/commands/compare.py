"""`rota compare`."""

from __future__ import annotations

import os
import sys
from argparse import Namespace

from rota import comparison
from rota.cli import files, json_reports
from rota.cli.arguments import add_cores, add_json, add_output
from rota.cli.json_reports import print_json
from rota.cli.parser import Command, Parser
from rota.cli.pictures import draw, is_measured
from rota.cli.requirements import InputError
from rota.cli.screen import print_wire_effects, report_columns
from rota.cli.wire_effects import free_text


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rota compare` to its parser."""
    parser.add_argument("planned", help="plan.json (which is simulated first), or timeline.json")
    parser.add_argument("measured", help="timeline.json, for example from `rota run --timeline`")
    add_cores(parser)
    add_json(parser)
    add_output(parser, "PICTURE", "also draw both timelines, as .png, .svg, .pdf or .html")


def run(arguments: Namespace) -> int:
    """Print the planned timeline against the measured one, and draw both to --output. Returns the exit code."""
    if os.path.realpath(arguments.planned) == os.path.realpath(arguments.measured):
        raise InputError(
            f"{arguments.measured} is given twice: compare a plan with a measured timeline, or two measured timelines"
        )
    planned, measured = files.read_timeline(arguments.planned), files.read_timeline(arguments.measured)
    if is_measured(planned):
        if not is_measured(measured):
            raise InputError(
                f"{arguments.planned} has measured times, and {arguments.measured} has planned times; give the plan "
                f"first, as in `rota compare {arguments.measured} {arguments.planned}`"
            )
        print(f"rota compare: {arguments.planned} has measured times, which are treated as planned", file=sys.stderr)
    elif not is_measured(measured):
        raise InputError(
            f"{arguments.planned} and {arguments.measured} both have planned times: nothing was measured. Write a "
            f"measured timeline with `rota run --timeline measured.json {arguments.planned} train.py`; "
            f"`rota show --above` compares two plans"
        )
    compared = comparison.compare(planned, measured, arguments.cores)
    files.note_one_step("compare", arguments.measured)
    assumed = files.note_assumed_times("compare", arguments.planned)
    if arguments.json:
        print_json({"times_assumed": assumed, **json_reports.of_comparison(compared)})
    else:
        print(compared.to_text(report_columns()))
        print_wire_effects(planned.plan, report_columns(), free_text(measured.num_ranks, compared.num_cores))
    if arguments.output is not None:
        draw(measured, arguments.output, planned, (arguments.planned, arguments.measured), quietly=arguments.json)
    return 0


COMMAND = Command(
    "compare",
    "compare predicted and measured times: where a run differed from its plan, and why",
    "rota compare plan.json measured.json",
    add_arguments,
    run,
)
