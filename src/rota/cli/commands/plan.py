"""`rota plan`."""

from __future__ import annotations

from typing import Any

import click

from rota.cli import common, files, reports
from rota.cli.command import Choice, Options, command
from rota.cli.plans import SEARCH, cluster_of, costs_of, measured, search_frontier, search_plan, shaped, uniform
from rota.cli.reports import print_json
from rota.cli.requirements import InputError, require
from rota.cli.screen import note, print_text, print_timeline, progress_line, report_columns, terminal_columns
from rota.core import simulation
from rota.core.costs import Costs
from rota.core.plan import Plan
from rota.core.tasks import Kind
from rota.schedules import NAMED, table

_ALL = "all"
_FOR_SEARCH = ("shape", "objective", "time_limit", "split_backward", "frontier")
_OF_ONE_PLAN = ("microbatches", "limit", "chunks", "objective")
_OF_ONE_SCHEDULE = ("stages", "chunks", "output")
_SCHEDULES = {
    SEARCH: "the fastest order found within the time limit, for any placement, with a proven bound",
    _ALL: "no plan, but a table of the named schedules: time, bubble, memory, and whether they fit; the costs are "
    "those of a rank, which schedules with several stages per rank divide among those stages",
    **{name: family.summary for name, family in NAMED.items()},
}


@command(
    "rota plan 1f1b --ranks 4 --microbatches 8 --forward-us 100 --backward-us 200 -o plan.json\n"
    "rota plan all --ranks 8 --microbatches 24 --activation 1GB --limit 8GB",
    glossary=_SCHEDULES,
)
@click.argument("schedule", type=Choice(_SCHEDULES), metavar="SCHEDULE", help="one of the schedules listed below")
@common.count(
    "--microbatches", metavar="M", help="micro-batches per step (no default: required, except with --frontier)"
)
@common.limit
@common.count(
    "--chunks",
    help="cut each sample into N micro-batches along its length; --microbatches counts them all (default: 1)",
)
@common.count("--stages", help="number of stages (default: the fewest that the schedule needs)")
@common.costs
@common.shape
@click.option(
    "--objective",
    type=Choice(("makespan", "span", "period")),
    metavar="NAME",
    help="for search: minimize the makespan (the time of one step; default), the span (the longest busy window of a "
    "rank), or the period (the time per micro-batch in steady state)",
)
@common.flag(
    "--frontier", help="for search: instead of a plan, show the shortest time per micro-batch at each memory limit"
)
@common.time_limit(help="for search: time limit in seconds (default: 10; with --frontier: 60)")
@common.json
@common.output(
    "FILE",
    "write the plan as .json, or as .csv in PyTorch's format; with --frontier: draw the curve as .png, .svg or .pdf",
    writes=lambda options: "file" if options.frontier else "plan",
)
def plan(options: Options) -> None:
    """Make a plan from a named schedule or by search, check it and draw it, or compare all named schedules."""
    if options.schedule != SEARCH:
        _refuse(options, _FOR_SEARCH, f"is for `rota plan search`; leave it out for {options.schedule}")
    elif options.frontier:
        _frontier(options)
        return
    if options.microbatches is None:
        raise InputError("how many micro-batches per step? give --microbatches")
    if options.schedule == _ALL:
        _compare_all(options)
        return
    planned, fields = _searched(options) if options.schedule == SEARCH else _named(options)
    if options.costs is not None:
        spread = files.read_costs(options.costs).spread
        if options.json:
            fields["spread"] = spread
        elif spread:
            print_text(f"The measured times of a stage vary by {spread:.0%} at most (interquartile range).")
    _warn_of_idle_ranks(planned)
    is_csv = options.output is not None and options.output.endswith(".csv")
    files.keep(options.output, planned.to_csv() if is_csv else planned.to_json(), "plan.json", quietly=options.json)
    if options.json:
        print_json({"schedule": options.schedule, **fields})


def _refuse(options: Options, names: tuple[str, ...], why: str) -> None:
    """Raise InputError if one of the options has a value."""
    for name in names:
        if getattr(options, name):
            raise InputError(f"--{name.replace('_', '-')} {why}")


def _compare_all(options: Options) -> None:
    """Print the figures of all named schedules as a table or JSON."""
    _refuse(options, _OF_ONE_SCHEDULE, "is for a plan; leave it out for all")
    if options.costs is None and options.ranks is None:
        raise InputError("how many ranks? give --ranks or --costs")
    costs = measured(options) if options.costs else uniform(options, options.ranks)
    if options.ranks not in (None, costs.num_stages):
        raise InputError(
            f"{options.costs} has {costs.num_stages} stages for --ranks {options.ranks}; give one stage per rank"
        )
    cluster = cluster_of(options, costs.num_stages, options.limit)
    with progress_line() as show:
        rows = table.compare_schedules(
            costs, cluster, options.microbatches, progress=lambda name: show(f"planning {name} …")
        )
    if options.json:
        print(table.to_json(rows), end="")
        return
    print(table.to_text(rows, options.limit, terminal_columns()))
    _print_assumed(options, [])


def _named(options: Options) -> tuple[Plan, dict[str, Any]]:
    """The plan by the named schedule, which is printed or, with --json, told in fields."""
    family = NAMED[options.schedule]
    stage_costs = costs_of(options, family.stages_per_rank)
    costs = family.adapted(stage_costs)
    cluster = cluster_of(options, costs.num_stages, options.limit)
    placement = family.place(costs, cluster).in_chunks(options.chunks or 1, options.microbatches)
    planned = family(placement, options.microbatches)
    simulation.check(planned)
    timeline, assumed = simulation.simulate(planned), _assumed(stage_costs, costs)
    if options.json:
        return planned, {"assumed": assumed, **reports.of_timeline(timeline)}
    print_timeline(timeline)
    _print_assumed(options, assumed)
    return planned, {}


def _searched(options: Options) -> tuple[Plan, dict[str, Any]]:
    """The plan with the best order found, which is printed or, with --json, told in fields."""
    placement = shaped(options, options.limit)
    placement = placement.in_chunks(options.chunks or 1, options.microbatches)
    result = search_plan(placement, options.microbatches, options.time_limit, options.objective or "makespan")
    if options.json:
        return result.plan, {"search": reports.of_search(result), **reports.of_timeline(result.timeline)}
    print_timeline(result.timeline)
    print(result.to_text(report_columns()))
    _print_assumed(options, [])
    if any(task.kind is Kind.B for task in placement.tasks):
        print_text("The backward is whole; --split-backward splits it into I and W, as the zero-bubble schedules do.")
    return result.plan, {}


def _frontier(options: Options) -> None:
    """Print the curve of memory limit against time per micro-batch, and draw it to --output."""
    _refuse(options, _OF_ONE_PLAN, "is of one plan, but --frontier tries every memory limit; leave it out")
    if options.output is not None:
        require("matplotlib", "draw")
    frontier = search_frontier(shaped(options, None), options.time_limit)
    if options.json:
        print_json(reports.of_frontier(frontier))
    else:
        print(frontier.to_text(report_columns()))
    if options.output is not None:
        from rota.drawing import save_frontier

        points = [(point.limit_bytes, float(point.us_per_microbatch)) for point in frontier.points]
        save_frontier(points, [(limit, float(us)) for limit, us in frontier.bounds], options.output)
        if not options.json:
            print(f"Wrote {options.output}.")


def _print_assumed(options: Options, assumed: list[str]) -> None:
    """Say which of the costs nobody has given."""
    defaults = {"forward_us": "F takes 1 ms", "backward_us": "B takes 2 ms", "activation_bytes": "F keeps 1 kB"}
    if options.costs is None:
        assumed = [text for name, text in defaults.items() if getattr(options, name) is None] + assumed
    if assumed:
        print_text(f"Assumed: {'; '.join(assumed)}.")


def _assumed(costs: Costs, adapted: Costs) -> list[str]:
    """The costs that the schedule needs and that had to be assumed."""
    assumed = []
    if costs.weight_us is None and adapted.weight_us is not None:
        assumed.append("I and W each take half of the backward, as the costs have no weight_us")
    if costs.weight_us is not None and adapted.weight_us is None:
        assumed.append("B takes as long as I and W together")
    if costs.recompute_us is None and adapted.recompute_us is not None:
        assumed.append("R takes as long as F, as the costs have no recompute_us")
    return assumed


def _warn_of_idle_ranks(planned: Plan) -> None:
    busy = sum(map(bool, planned.orders))
    if busy < planned.num_ranks:
        note(
            "plan",
            f"warning: {planned.num_ranks - busy} of {planned.num_ranks} ranks have nothing to do; give "
            f"more stages, or --ranks {busy}",
        )
