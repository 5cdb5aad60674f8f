"""`rota compare`."""

from __future__ import annotations

import os

from rota.accounting import comparison
from rota.cli import common, files, reports
from rota.cli.command import Options, command
from rota.cli.reports import draw, is_measured, print_json
from rota.cli.requirements import InputError
from rota.cli.screen import note, print_transfers, report_columns


@command("rota compare plan.json measured.json")
@common.argument("planned", help="plan.json (which is simulated first), or timeline.json")
@common.argument("measured", help="timeline.json, for example from `rota run --timeline`")
@common.cores
@common.json
@common.output("PICTURE", "also draw both timelines, as .png, .svg, .pdf or .html")
def compare(options: Options) -> None:
    """Compare predicted and measured times: where a run differed from its plan, and why."""
    if os.path.realpath(options.planned) == os.path.realpath(options.measured):
        raise InputError(
            f"{options.measured} is given twice: compare a plan with a measured timeline, or two measured timelines"
        )
    planned, measured = files.read_timeline(options.planned), files.read_timeline(options.measured)
    if is_measured(planned):
        if not is_measured(measured):
            raise InputError(
                f"{options.planned} has measured times, and {options.measured} has planned times; give the plan "
                f"first, as in `rota compare {options.measured} {options.planned}`"
            )
        note("compare", f"{options.planned} has measured times, which are treated as planned")
    elif not is_measured(measured):
        raise InputError(
            f"{options.planned} and {options.measured} both have planned times: nothing was measured. Write a "
            f"measured timeline with `rota run --timeline measured.json {options.planned} train.py`; "
            f"`rota show --above` compares two plans"
        )
    compared = comparison.compare(planned, measured, options.cores)
    files.note_one_step("compare", options.measured)
    assumed = files.note_assumed_times("compare", options.planned)
    if options.json:
        print_json({"times_assumed": assumed, **reports.of_comparison(compared)})
    else:
        print(compared.to_text(report_columns()))
        print_transfers(planned.plan)
    if options.output is not None:
        draw(measured, options.output, planned, (options.planned, options.measured), quietly=options.json)
