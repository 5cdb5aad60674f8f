"""`rota calibrate`."""

from __future__ import annotations

import click

from rota import calibration
from rota.cli import common, files, reports
from rota.cli.command import Choice, Options, Output, command
from rota.cli.plans import SEARCH, search_plan
from rota.cli.reports import print_json
from rota.cli.requirements import InputError
from rota.cli.screen import counts_transfers, progress_line, report_columns
from rota.core.timeline import Timeline
from rota.schedules import NAMED


@command("rota calibrate measured.json -o better.json")
@common.argument(
    "timelines",
    nargs=-1,
    required=True,
    metavar="MEASURED...",
    help="timeline.json from `rota run --timeline`; with several timelines, op times are medians over all of them",
)
@click.option(
    "--plan",
    "schedule",
    type=Choice((SEARCH, *NAMED)),
    metavar="NAME",
    help="a schedule's name, or search (default: the fastest named schedule that fits)",
)
@common.time_limit(help="with --plan search: time limit in seconds (default: 10)")
@common.file("--costs", cls=Output, help="write the measured costs as JSON, for `rota plan --costs`")
@common.json
@common.output("FILE", "write the better plan as JSON or, if there is none, the same plan with the measured costs")
def calibrate(options: Options) -> None:
    """Update a plan's costs with measured times, and make a new plan if it would be faster."""
    if options.time_limit is not None and options.schedule != SEARCH:
        raise InputError("--time-limit is for --plan search; leave it out, or add --plan search")
    timelines = [_measured(path) for path in options.timelines]
    named = None if options.schedule == SEARCH else options.schedule
    with progress_line() as show:
        calibrated = calibration.calibrate(timelines, named, lambda name: show(f"planning {name} …"))
    if options.schedule == SEARCH:
        result = search_plan(calibrated.plan.placement, calibrated.plan.num_microbatches, options.time_limit)
        calibrated = calibrated.with_plan(f"{SEARCH} ({result.how})", result.plan)
    if options.json:
        print_json(reports.of_calibration(calibrated))
    else:
        print(calibrated.to_text(report_columns()))
    if options.costs is not None:
        placement, note = calibrated.plan.placement, f"calibrated by {', '.join(options.timelines)}"
        # Links are not part of costs, but of plans and timelines.
        links = f" --links {options.output or options.timelines[0]}" if counts_transfers(placement) else ""
        then = f"; plan with `rota plan … --costs {options.costs}{links}`"
        files.write(options.costs, calibration.costs_of(placement, note).to_json(), then, quietly=options.json)
    if options.output is not None:
        then = ": the same order of ops, with the measured costs" if calibrated.chosen is calibrated.plan else ""
        files.write(options.output, calibrated.chosen.to_json(), then, quietly=options.json)


def _measured(path: str) -> Timeline:
    loaded = files.read_plan_or_timeline(path)
    if not isinstance(loaded, Timeline):
        raise InputError(f"{path} is a plan; give timelines measured with `rota run --timeline`")
    return loaded
