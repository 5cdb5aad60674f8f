"""`rota explain`."""

from __future__ import annotations

import json

from rota import accounting
from rota.cli import common, files
from rota.cli.command import Options, command
from rota.cli.reports import is_measured, print_json
from rota.cli.screen import print_transfers, progress_line, report_columns, transfers_text


@command("rota explain timeline.json")
@common.argument("timeline", help="timeline.json, or a plan (which is simulated first)")
@common.file("--planned", help="plan that has the expected op times (default: the timeline's own plan)")
@common.cores
@common.json
def explain(options: Options) -> None:
    """Show why ranks are idle, largest causes first, and what would help."""
    timeline = files.read_timeline(options.timeline)
    planned = None if options.planned is None else files.read_timeline(options.planned)
    with progress_line("simulating what would help …"):
        explanation = accounting.explain(timeline, planned, options.cores)
    if is_measured(timeline):
        files.note_one_step("explain", options.timeline)
    assumed = files.note_assumed_times("explain", *filter(None, (options.timeline, options.planned)))
    if options.json:
        transfers = transfers_text(timeline.plan.placement)
        print_json({"times_assumed": assumed, "transfers": transfers, **json.loads(explanation.to_json())})
    else:
        print(explanation.to_text(report_columns()))
        print_transfers(timeline.plan)
