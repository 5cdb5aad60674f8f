"""`rota calibrate`."""

from __future__ import annotations

from argparse import Namespace

from rota import calibration
from rota.cli import files, json_reports
from rota.cli.arguments import add_json, add_output, add_time_limit
from rota.cli.json_reports import print_json
from rota.cli.parser import Command, Parser, one_of
from rota.cli.requirements import InputError
from rota.cli.screen import progress_line, report_columns
from rota.cli.searching import SEARCH, search_plan
from rota.cli.wire_effects import counts_transfers
from rota.schedules import NAMED
from rota.timeline import Timeline


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rota calibrate` to its parser."""
    help_text = (
        "timeline.json from `rota run --timeline`; with several timelines, op times are medians over all of them"
    )
    parser.add_argument("timelines", nargs="+", metavar="MEASURED", help=help_text)
    parser.add_argument(
        "--plan",
        dest="schedule",
        type=one_of((SEARCH, *NAMED), "--plan", any_case=True),
        choices=(SEARCH, *NAMED),
        metavar="NAME",
        help="a schedule's name, or search (default: the fastest named schedule that fits)",
    )
    add_time_limit(parser, "with --plan search: time limit in seconds (default: 10)")
    parser.add_argument("--costs", metavar="FILE", help="write the measured costs as JSON, for `rota plan --costs`")
    add_json(parser)
    add_output(
        parser, "FILE", "write the better plan as JSON or, if there is none, the same plan with the measured costs"
    )
    parser.set_defaults(written={"output": "file", "costs": "file"})


def run(arguments: Namespace) -> int:
    """Print the calibrated costs and the plan chosen for them, and write both where asked. Returns the exit code."""
    if arguments.time_limit is not None and arguments.schedule != SEARCH:
        raise InputError("--time-limit is for --plan search; leave it out, or add --plan search")
    timelines = [_measured(path) for path in arguments.timelines]
    named = None if arguments.schedule == SEARCH else arguments.schedule
    with progress_line() as show:
        found = calibration.calibrate(timelines, named, lambda name: show(f"planning {name} …"))
    if arguments.schedule == SEARCH:
        result = search_plan(found.plan.placement, found.plan.num_microbatches, arguments.time_limit)
        found = found.with_plan(f"{SEARCH} ({result.how})", result.plan)
    if arguments.json:
        print_json(json_reports.of_calibration(found))
    else:
        print(found.to_text(report_columns()))
    if arguments.costs is not None:
        placement, note = found.plan.placement, f"calibrated by {', '.join(arguments.timelines)}"
        # Links are not part of costs, but of plans and timelines.
        links = f" --links {arguments.output or arguments.timelines[0]}" if counts_transfers(placement) else ""
        then = f"; plan with `rota plan … --costs {arguments.costs}{links}`"
        files.write(arguments.costs, calibration.costs_of(placement, note).to_json(), then, quietly=arguments.json)
    if arguments.output is not None:
        kept = ": the same order of ops, with the measured costs" if found.chosen is found.plan else ""
        files.write(arguments.output, found.chosen.to_json(), kept, quietly=arguments.json)
    return 0


def _measured(path: str) -> Timeline:
    loaded = files.read_plan_or_timeline(path)
    if not isinstance(loaded, Timeline):
        raise InputError(f"{path} is a plan; give timelines measured with `rota run --timeline`")
    return loaded


COMMAND = Command(
    "calibrate",
    "update a plan's costs with measured times, and make a new plan if it would be faster",
    "rota calibrate measured.json -o better.json",
    add_arguments,
    run,
)
