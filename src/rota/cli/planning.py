"""`rota plan`, `rota schedules`, `rota bound` and `rota frontier`."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from rota import checking, simulation
from rota.cli import files, inputs
from rota.cli.interrupts import told_at_once
from rota.cli.screen import print_timeline, show_progress
from rota.costs import Costs
from rota.placement import Placement
from rota.plan import Plan
from rota.schedules import NAMED, table
from rota.tasks import Kind
from rota.timeline import Timeline
from rota.units import size_text

if TYPE_CHECKING:
    from rota.search import Point, SearchResult
    from rota.search.result import Objective

SEARCH = "search"
_STARTING = "starting (the first search on a machine compiles for some ten seconds)"


def plan(arguments: Namespace) -> int:
    planned = _searched(arguments) if arguments.schedule == SEARCH else _named(arguments)
    _tell_idle_ranks(planned)
    if arguments.output is None:
        print("Not written; use -o plan.json to keep it.")
    else:
        text = planned.to_csv() if arguments.output.endswith(".csv") else planned.to_json()
        files.write(arguments.output, text)
        print(f"Wrote {arguments.output}.")
    return 0


def _named(arguments: Namespace) -> Plan:
    for option in ("shape", "objective", "time_limit", "split_backward"):
        if getattr(arguments, option):
            name = "--" + option.replace("_", "-")
            raise files.InputError(f"{name} is for `rota plan search`; leave it out for {arguments.schedule}")
    family = NAMED[arguments.schedule]
    given = inputs.costs_of(arguments, family.stages_a_rank)
    costs = family.adapted(given)
    planned = family(
        family.place(costs, inputs.cluster_of(arguments, costs.num_stages, arguments.limit)), arguments.microbatches
    )
    checking.check(planned)
    print_timeline(simulation.simulate(planned))
    _tell_assumed(given, costs)
    return planned


def _searched(arguments: Namespace) -> Plan:
    _require_search()
    arguments.shape = arguments.shape or "v"
    placement = inputs.shaped(arguments, arguments.limit)
    result = searched(placement, arguments.microbatches, arguments.time_limit, arguments.objective or "makespan")
    print_timeline(result.timeline)
    print(result.to_text())
    if any(task.kind is Kind.B for task in placement.tasks):
        print("The backward is whole; --split-backward halves it into I and W, as the zero-bubble schedules do.")
    return result.plan


def searched(
    placement: Placement, num_microbatches: int, time_limit_s: float | None, objective: Objective = "makespan"
) -> SearchResult:
    """By `find_plan`, with progress on the screen; `time_limit_s` None: 10."""
    _require_search()
    from rota.search import find_plan

    show_progress(_STARTING)
    try:
        return find_plan(
            placement,
            num_microbatches,
            objective=objective,
            time_limit_s=time_limit_s or 10.0,
            progress=show_progress,
        )
    finally:
        show_progress("")


def _require_search() -> None:
    for module in ("ortools", "numba"):
        files.require(module, "search")
    with told_at_once():
        import rota.search  # noqa: F401


def _tell_assumed(given: Costs, adapted: Costs) -> None:
    """What the schedule needs and the costs lack, in a line."""
    told = []
    if given.weight_us is None and adapted.weight_us is not None:
        told.append("I and W each take half of the backward, as the costs have no weight_us")
    if given.weight_us is not None and adapted.weight_us is None:
        told.append("B takes as long as I and W together")
    if given.recompute_us is None and adapted.recompute_us is not None:
        told.append("R takes as long as F, as the costs have no recompute_us")
    if told:
        print(f"Assumed: {'; '.join(told)}.")


def _tell_idle_ranks(planned: Plan) -> None:
    busy = sum(map(bool, planned.orders))
    if busy < planned.num_ranks:
        print(
            f"rota plan: warning: {planned.num_ranks - busy} of {planned.num_ranks} ranks have nothing to do; give "
            f"more stages, or --ranks {busy}",
            file=sys.stderr,
        )


def schedules(arguments: Namespace) -> int:
    if arguments.costs is None and arguments.ranks is None:
        raise files.InputError("how many ranks? give --ranks or --costs")
    costs = inputs.measured(arguments) if arguments.costs else inputs.uniform(arguments, arguments.ranks)
    if arguments.ranks not in (None, costs.num_stages):
        raise files.InputError(
            f"{arguments.costs} has {costs.num_stages} stages for --ranks {arguments.ranks}; the table takes one a rank"
        )
    cluster = inputs.cluster_of(arguments, costs.num_stages, arguments.limit)
    rows = table.compare_schedules(
        costs, cluster, arguments.microbatches, progress=lambda name: show_progress(f"planning {name} …")
    )
    show_progress("")
    if arguments.json or arguments.csv:
        print(table.to_json(rows) if arguments.json else table.to_csv(rows), end="")
    else:
        print(table.to_text(rows, arguments.limit))
    return 0


def bound(arguments: Namespace) -> int:
    loaded = files.read_plan_or_timeline(arguments.plan)
    planned = loaded.plan if isinstance(loaded, Timeline) else loaded
    _require_search()
    from rota.search import bounds_of, gap

    timeline = simulation.simulate(planned)
    if isinstance(loaded, Timeline):
        _tell_measured(loaded, timeline)
    for objective, value_us in (("makespan", timeline.makespan_us), ("span", timeline.span_us)):
        bounds = bounds_of(planned.placement, planned.num_microbatches, objective)
        best = bounds[0].us
        proof = "proven optimal" if value_us <= best else f"at most {gap(value_us, best):.2%} from the best possible"
        print(f"{objective} {value_us:,} µs; no plan for this placement has less than {best:,}: {proof}")
        highest = {one.name: one for one in reversed(bounds) if one.us}
        for one in sorted(highest.values(), key=lambda one: -one.us):
            print(f"  {one.us:>12,} µs  {one.name}: {one.why}")
    return 0


def _tell_measured(timeline: Timeline, planned: Timeline) -> None:
    """The bounds are on the plan's own costs, which the measured times need not be near."""
    if (timeline.makespan_us, timeline.span_us) != (planned.makespan_us, planned.span_us):
        print(
            f"measured makespan {timeline.makespan_us:,} µs, span {timeline.span_us:,} µs; planned, and bounded below, "
            f"are {planned.makespan_us:,} and {planned.span_us:,} (`rota compare` tells what was slower)"
        )


def frontier(arguments: Namespace) -> int:
    _require_search()
    from rota.search import find_frontier

    if arguments.output is not None:
        files.require("matplotlib", "draw")
    placement = inputs.shaped(arguments, None)
    show_progress(_STARTING)
    try:
        found = find_frontier(placement, time_limit_s=arguments.time_limit, progress=_show_point)
    finally:
        show_progress("")
    print(found.to_text())
    if arguments.output is not None:
        from rota.drawing import save_frontier

        points = [(point.limit_bytes, float(point.us_per_microbatch)) for point in found.points]
        save_frontier(points, [(limit, float(us)) for limit, us in found.bounds], arguments.output)
        print(f"Wrote {arguments.output}.")
    return 0


def _show_point(point: Point) -> None:
    show_progress(f"{size_text(point.limit_bytes)} a rank: {float(point.us_per_microbatch):,.1f} µs a micro-batch")
