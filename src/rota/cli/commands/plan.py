"""`rota plan`."""

from __future__ import annotations

import importlib.util
import sys
from argparse import Namespace
from functools import partial
from typing import Any

from rota import checking, simulation
from rota.cli import files, json_reports
from rota.cli.arguments import (
    add_costs,
    add_json,
    add_limit,
    add_output,
    add_shape,
    add_snapshots,
    add_time_limit,
    cluster_of,
    costs_of,
    number,
    shaped,
)
from rota.cli.json_reports import print_json
from rota.cli.parser import Command, Parser, one_of, two_columns
from rota.cli.requirements import InputError, require
from rota.cli.screen import print_snapshots, print_text, print_timeline, progress_line, report_columns
from rota.cli.searching import SEARCH, search_frontier, search_plan
from rota.cluster import Cluster
from rota.costs import Costs
from rota.errors import PipelineError
from rota.plan import Plan
from rota.schedules import NAMED
from rota.tasks import Kind

_MEASURED_ON_CPU = "measured on CPU"  # how the note of such costs begins
_OBJECTIVES = ("makespan", "span", "period")
_FOR_SEARCH = ("shape", "objective", "time_limit", "split_backward")
_OF_ONE_PLAN = ("microbatches", "limit", "snapshots", "chunks", "objective")


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rota plan` to its parser."""
    parser.add_argument(
        "schedule",
        type=one_of((SEARCH, *NAMED), any_case=True),
        choices=(SEARCH, *NAMED),
        metavar="SCHEDULE",
        help="one of the schedules listed below",
    )
    help_text = "micro-batches per step (no default: required, except with --frontier)"
    parser.add_argument("--microbatches", type=number(1), metavar="M", help=help_text)
    add_limit(parser)
    add_snapshots(parser)
    help_text = "cut each sample into N micro-batches along its length; --microbatches counts them all (default: 1)"
    parser.add_argument("--chunks", type=number(1), metavar="N", help=help_text)
    parser.add_argument(
        "--stages", type=number(1), metavar="N", help="number of stages (default: the fewest that the schedule needs)"
    )
    default_links = (
        "all links as set by --link or, if no option describes the links and --costs were measured on a CPU, as "
        "measured between processes on this machine"
    )
    add_costs(parser, "stage", default_links)
    add_shape(parser, "for search")
    parser.add_argument(
        "--objective",
        type=one_of(_OBJECTIVES, "--objective"),
        choices=_OBJECTIVES,
        help="for search: minimize the makespan (the time of one step; default), the span (the longest busy "
        "window of a rank), or the period (the time per micro-batch in steady state)",
    )
    help_text = "for search: instead of a plan, show the shortest time per micro-batch at each memory limit"
    parser.add_argument("--frontier", action="store_true", help=help_text)
    add_time_limit(parser, "for search: time limit in seconds (default: 10; with --frontier: 60)")
    add_json(parser)
    help_text = "write the plan as .json, or as .csv in PyTorch's format; with --frontier: draw the curve as .png, "
    help_text += ".svg or .pdf"
    add_output(parser, "FILE", help_text, writes=lambda arguments: "file" if arguments.frontier else "plan")
    named = {SEARCH: "the fastest order found within the time limit, for any placement, with a proven bound"}
    named |= {name: family.summary for name, family in NAMED.items()}
    parser.add_argument_group("schedules", two_columns(named))


def run(arguments: Namespace) -> int:
    """Make a plan by the named schedule or by search, and write it as JSON or CSV. Returns the exit code."""
    arguments.links_of = partial(_links, arguments)
    if arguments.frontier:
        return _frontier(arguments)
    if arguments.microbatches is None:
        raise InputError("how many micro-batches per step? give --microbatches")
    planned, fields = _searched(arguments) if arguments.schedule == SEARCH else _named(arguments)
    if arguments.costs is not None:
        spread = files.read_costs(arguments.costs).spread
        fields |= {"spread": spread} if arguments.json else {}
        _print_spread(0.0 if arguments.json else spread)
    _warn_of_idle_ranks(planned)
    is_csv = arguments.output is not None and arguments.output.endswith(".csv")
    text = planned.to_csv() if is_csv else planned.to_json()
    files.keep(arguments.output, text, "plan.json", quietly=arguments.json)
    if arguments.json:
        print_json({"schedule": arguments.schedule, **fields})
    return 0


def _links(arguments: Namespace, num_ranks: int) -> Cluster | None:
    """The links between CPUs of this machine, if costs were measured on one like it; None: transfers cost nothing."""
    if arguments.costs is None:
        return None
    costs = files.read_costs(arguments.costs)
    if costs.note.startswith(_MEASURED_ON_CPU) and importlib.util.find_spec("torch") is not None and num_ranks > 1:
        from rota.profiling.forked import why_not_here
        from rota.profiling.machine_links import measured_on_this_machine
        from rota.runtime.device.local import CPU

        if not why_not_here(num_ranks):
            try:
                with progress_line() as show:
                    found = measured_on_this_machine(num_ranks, device=CPU, report=show)
            except PipelineError as error:
                print(f"rota plan: warning: links were not measured: {error}", file=sys.stderr)
                return None
            if found.doubt:
                print(f"rota plan: warning: links were measured on a busy machine: {found.doubt}", file=sys.stderr)
            return found.cluster
    return None


def _named(arguments: Namespace) -> tuple[Plan, dict[str, Any]]:
    """The plan by the named schedule, which is printed or, with --json, told in fields."""
    for option in _FOR_SEARCH:
        if getattr(arguments, option):
            raise InputError(f"{_name(option)} is for `rota plan search`; leave it out for {arguments.schedule}")
    family = NAMED[arguments.schedule]
    given = costs_of(arguments, family.stages_per_rank)
    costs = family.adapted(given)
    cluster = cluster_of(arguments, costs.num_stages, arguments.limit)
    placement = family.place(costs, cluster).in_chunks(arguments.chunks or 1, arguments.microbatches)
    planned = family(placement, arguments.microbatches)
    checking.check(planned)
    timeline, assumed = simulation.simulate(planned), _assumed(given, costs)
    if arguments.json:
        return planned, {"assumed": assumed, **json_reports.of_timeline(timeline)}
    print_timeline(timeline)
    print_snapshots(timeline)
    if assumed:
        print_text(f"Assumed: {'; '.join(assumed)}.")
    return planned, {}


def _searched(arguments: Namespace) -> tuple[Plan, dict[str, Any]]:
    """The plan with the best order found, which is printed or, with --json, told in fields."""
    arguments.shape = arguments.shape or "v"
    placement = shaped(arguments, arguments.limit).in_chunks(arguments.chunks or 1, arguments.microbatches)
    result = search_plan(placement, arguments.microbatches, arguments.time_limit, arguments.objective or "makespan")
    if arguments.json:
        return result.plan, {"search": json_reports.of_search(result), **json_reports.of_timeline(result.timeline)}
    print_timeline(result.timeline)
    print_snapshots(result.timeline)
    print(result.to_text(report_columns()))
    if any(task.kind is Kind.B for task in placement.tasks):
        print_text("The backward is whole; --split-backward splits it into I and W, as the zero-bubble schedules do.")
    return result.plan, {}


def _frontier(arguments: Namespace) -> int:
    """Print the curve of memory limit against time per micro-batch, and draw it to --output. Returns the exit code."""
    if arguments.schedule != SEARCH:
        raise InputError(f"--frontier is for `rota plan search`; leave it out for {arguments.schedule}")
    for option in _OF_ONE_PLAN:
        if getattr(arguments, option):
            raise InputError(f"--frontier makes no plan, but tries every memory limit; leave {_name(option)} out")
    if arguments.output is not None:
        require("matplotlib", "draw")
    arguments.shape = arguments.shape or "v"
    found = search_frontier(shaped(arguments, None), arguments.time_limit)
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


def _name(option: str) -> str:
    return "--" + option.replace("_", "-")


def _assumed(given: Costs, adapted: Costs) -> list[str]:
    """The costs that the schedule needs and that had to be assumed."""
    assumed = []
    if given.weight_us is None and adapted.weight_us is not None:
        assumed.append("I and W each take half of the backward, as the costs have no weight_us")
    if given.weight_us is not None and adapted.weight_us is None:
        assumed.append("B takes as long as I and W together")
    if given.recompute_us is None and adapted.recompute_us is not None:
        assumed.append("R takes as long as F, as the costs have no recompute_us")
    return assumed


def _print_spread(spread: float) -> None:
    """How far the repeated timings are apart that the costs are from, if they were measured."""
    if spread:
        print_text(f"The measured times of a stage vary by {spread:.0%} at most (interquartile range).")


def _warn_of_idle_ranks(planned: Plan) -> None:
    busy = sum(map(bool, planned.orders))
    if busy < planned.num_ranks:
        print(
            f"rota plan: warning: {planned.num_ranks - busy} of {planned.num_ranks} ranks have nothing to do; give "
            f"more stages, or --ranks {busy}",
            file=sys.stderr,
        )


COMMAND = Command(
    "plan",
    "make a plan from a named schedule or by search, check it and draw it",
    "rota plan 1f1b --ranks 4 --microbatches 8 --forward-us 100 --backward-us 200 -o plan.json",
    add_arguments,
    run,
)
