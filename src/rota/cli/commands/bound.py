"""`rota bound`."""

from __future__ import annotations

from argparse import Namespace

from rota import simulation
from rota.cli import files, json_reports
from rota.cli.arguments import add_json
from rota.cli.json_reports import print_json
from rota.cli.parser import Command, Parser
from rota.cli.requirements import require_search
from rota.cli.screen import print_text, print_wire_effects, progress_line, report_columns
from rota.cli.wire_effects import wire_effects
from rota.tables import fitted
from rota.timeline import Timeline


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rota bound` to its parser."""
    parser.add_argument(
        "plan",
        help="plan.json, or a schedule CSV in PyTorch's format (with assumed times: forward 1 ms, backward 2 ms)",
    )
    add_json(parser)


def run(arguments: Namespace) -> int:
    """Print lower bounds (µs) on the makespan and span, and the plan's gap to them. Returns the exit code."""
    loaded = files.read_plan_or_timeline(arguments.plan)
    planned = loaded.plan if isinstance(loaded, Timeline) else loaded
    require_search()
    from rota.search import bounds_of, gap

    timeline = simulation.simulate(planned)
    found = []
    with progress_line() as show:
        for objective, value_us in (("makespan", timeline.makespan_us), ("span", timeline.span_us)):
            show(f"computing lower bounds on the {objective} …")
            found.append((objective, value_us, bounds_of(planned.placement, planned.num_microbatches, objective)))
    assumed = files.note_assumed_times("bound", arguments.plan)
    if arguments.json:
        effects = wire_effects(planned.placement)
        print_json({"times_assumed": assumed, "wire_effects": effects, **json_reports.of_bounds(found)})
        return 0
    if isinstance(loaded, Timeline):
        _print_measured(loaded, timeline)
    for objective, value_us, bounds in found:
        best = bounds[0].us
        proof = "proven optimal" if value_us <= best else f"within {gap(value_us, best):.2%} of the optimum"
        print(fitted(f"{objective} {value_us:,} µs, lower bound {best:,} µs: {proof}", report_columns()))
        highest = {one.name: one for one in reversed(bounds) if one.us}
        for one in sorted(highest.values(), key=lambda one: -one.us):
            print(fitted(f"  {one.us:>12,} µs  {one.name}: {one.why}", report_columns(), 19))
    print_wire_effects(planned, report_columns())
    return 0


def _print_measured(timeline: Timeline, planned: Timeline) -> None:
    """Say what was measured: the bounds are those of the plan's own costs."""
    if (timeline.makespan_us, timeline.span_us) != (planned.makespan_us, planned.span_us):
        print_text(
            f"measured makespan {timeline.makespan_us:,} µs, span {timeline.span_us:,} µs; the bounds below are for "
            f"the planned makespan {planned.makespan_us:,} µs and span {planned.span_us:,} µs (`rota compare` shows "
            f"what was slower)"
        )


COMMAND = Command("bound", "prove how close a plan is to the optimum", "rota bound plan.json", add_arguments, run)
