"""`rota show`."""

from __future__ import annotations

from rota.cli import common, files, reports
from rota.cli.command import Options, Output, command
from rota.cli.reports import draw, is_measured, print_json
from rota.cli.requirements import InputError, require
from rota.cli.screen import print_timeline, progress_line
from rota.core.timeline import Timeline


@command("rota show plan.json -o plan.html")
@common.argument(
    "file", help="plan.json (which is simulated first), timeline.json, or a schedule CSV in PyTorch's format"
)
@common.costs_of_csv
@common.output("PICTURE", "write a .png, .svg, .pdf or .html instead, or a .json for Perfetto")
@common.file("--timeline", cls=Output, writes="timeline", help="also write the timeline that is shown as JSON")
@common.file("--above", help="with -o: draw a second plan or timeline above the first, on the same time axis")
@common.flag("--bound", help="with -o: show the gap to a proven lower bound")
@common.json
def show(options: Options) -> None:
    """Draw a plan or timeline as a chart."""
    timeline = files.read_timeline(options.file, options.costs)
    assumed = options.costs is None and files.note_assumed_times("show", options.file)
    if options.above is not None:
        files.note_assumed_times("show", options.above)
    if options.json:
        print_json({"times_assumed": assumed, **reports.of_timeline(timeline)})
    if options.output is not None:
        above = None if options.above is None else files.read_timeline(options.above)
        bound_us = _bound_us(timeline, options.file) if options.bound else None
        names = (str(options.above), options.file)
        draw(timeline, options.output, above, names, bound_us, quietly=options.json)
    elif options.above is not None or options.bound:
        option = "--bound" if options.above is None else f"--above {options.above}"
        raise InputError(f"{option} is for pictures; name one with -o, such as -o plan.html")
    elif not options.json:
        print_timeline(timeline)
    if options.timeline is not None:
        files.write(options.timeline, timeline.to_json(), quietly=options.json)


def _bound_us(timeline: Timeline, name: str) -> int:
    """A lower bound with the plan's own costs. Raises InputError for measured times, which may be below it."""
    if is_measured(timeline):
        raise InputError(
            f"--bound: {name} has measured times, but the bound is for planned times; show the plan instead"
        )
    require("ortools", "search")
    from rota.search import bounds_of

    with progress_line("computing lower bounds on the makespan …"):
        return bounds_of(timeline.plan.placement, timeline.plan.num_microbatches)[0].us
