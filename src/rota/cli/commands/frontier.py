"""`rota frontier`."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from rota.cli import json_reports
from rota.cli.arguments import add_costs, add_json, add_output, add_shape, add_time_limit, number, shaped
from rota.cli.json_reports import print_json
from rota.cli.parser import Command, Parser
from rota.cli.requirements import require, require_search
from rota.cli.screen import progress_line, report_columns
from rota.cli.searching import STARTING
from rota.units import size_text

if TYPE_CHECKING:
    from rota.search import Point


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rota frontier` to its parser."""
    parser.add_argument(
        "--stages", type=number(1), metavar="N", help="number of stages (default: the number that the shape needs)"
    )
    add_costs(parser, "stage")
    add_shape(parser, default="v")
    add_time_limit(parser, "time limit in seconds (default: 60)", default=60.0)
    add_json(parser)
    add_output(parser, "PICTURE", "draw the curve as .png, .svg or .pdf")


def run(arguments: Namespace) -> int:
    """Print the curve of memory limit against period, and draw it to --output. Returns the exit code."""
    require_search()
    from rota.search import find_frontier

    if arguments.output is not None:
        require("matplotlib", "draw")
    placement = shaped(arguments, None)
    with progress_line() as show:
        show(STARTING)
        found = find_frontier(placement, time_limit_s=arguments.time_limit, progress=lambda point: show(_text(point)))
    if arguments.json:
        print_json(json_reports.of_frontier(found))
    else:
        print(found.to_text(report_columns()))
    if arguments.output is not None:
        from rota.drawing import save_frontier

        points = [(point.limit_bytes, float(point.us_per_microbatch)) for point in found.points]
        save_frontier(points, [(limit, float(us)) for limit, us in found.bounds], arguments.output)
        if not arguments.json:
            print(f"Wrote {arguments.output}.")
    return 0


def _text(point: Point) -> str:
    return f"{size_text(point.limit_bytes)} per rank: {float(point.us_per_microbatch):,.1f} µs per micro-batch"


COMMAND = Command(
    "frontier",
    "show the shortest time per micro-batch at each memory limit",
    "rota frontier --shape wave --ranks 8 --forward-us 93 --backward-us 91 --weight-us 47 --activation 2GB",
    add_arguments,
    run,
)
