"""`rota calibrate`."""

from __future__ import annotations

from argparse import Namespace

from rota import calibration
from rota.cli import files
from rota.cli.planning import SEARCH, searched
from rota.cli.screen import show_progress
from rota.timeline import Timeline


def calibrate(arguments: Namespace) -> int:
    if arguments.time_limit is not None and arguments.schedule != SEARCH:
        raise files.InputError("--time-limit is for --plan search; leave it out, or search")
    timelines = [_measured(path) for path in arguments.timelines]
    named = None if arguments.schedule == SEARCH else arguments.schedule
    found = calibration.calibrate(timelines, named, lambda name: show_progress(f"planning {name} …"))
    show_progress("")
    if arguments.schedule == SEARCH:
        result = searched(found.plan.placement, found.plan.num_microbatches, arguments.time_limit)
        found = found.with_plan(f"{SEARCH} ({result.how})", result.plan)
    print(found.to_text())
    if arguments.costs is not None:
        note = f"calibrated by {', '.join(arguments.timelines)}"
        files.write(arguments.costs, calibration.costs_of(found.plan.placement, note).to_json())
        print(f"Wrote {arguments.costs}.")
    if arguments.output is not None:
        files.write(arguments.output, found.chosen.to_json())
        print(f"Wrote {arguments.output}.")
    return 0


def _measured(path: str) -> Timeline:
    loaded = files.read_plan_or_timeline(path)
    if not isinstance(loaded, Timeline):
        raise files.InputError(f"{path} is a plan, which says what was expected; give timelines, what was measured")
    return loaded
