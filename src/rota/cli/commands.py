"""What each command does; heavy libraries are imported inside."""

from __future__ import annotations

import shutil
import sys
from argparse import Namespace

from rota import checking, comparison, simulation
from rota.cli import files
from rota.costs import Cluster, Costs
from rota.placing import place
from rota.schedules import NAMED
from rota.timeline import Timeline


def demo(arguments: Namespace) -> int:
    files.require("torch", "torch")
    from rota.demo.main import run_demo

    run_demo(arguments.output, arguments.steps)
    return 0


def plan(arguments: Namespace) -> int:
    costs = _costs(arguments)
    num_ranks = arguments.ranks or costs.num_stages
    cluster = Cluster.uniform(num_ranks, arguments.limit, arguments.latency_us, arguments.bytes_per_us)
    placement = place(costs, cluster, [stage % num_ranks for stage in range(costs.num_stages)])
    if arguments.schedule == "forward_only":
        placement = placement.forward_only()
    planned = NAMED[arguments.schedule](placement, arguments.microbatches)
    checking.check(planned)
    _print(simulation.simulate(planned))
    if arguments.output is None:
        print("Not written; use -o plan.json to keep it.")
    else:
        text = planned.to_csv() if arguments.output.endswith(".csv") else planned.to_json()
        files.write(arguments.output, text)
        print(f"Wrote {arguments.output}.")
    return 0


def _costs(arguments: Namespace) -> Costs:
    if arguments.costs is not None:
        return files.read_costs(arguments.costs)
    if arguments.ranks is None and arguments.stages is None:
        raise files.InputError("how many stages? give --ranks, --stages or --costs")
    return Costs.uniform(
        arguments.stages or arguments.ranks,
        forward_us=arguments.forward_us,
        backward_us=arguments.backward_us,
        weight_us=arguments.weight_us,
        activation_bytes=arguments.activation,
        boundary_bytes=arguments.boundary,
    )


def check(arguments: Namespace) -> int:
    planned = files.read_plan(arguments.plan)
    checking.check(planned)
    timeline = simulation.simulate(planned)
    limits = planned.placement.cluster.limit_bytes
    fits = "fits in memory" if any(limit is not None for limit in limits) else "no memory limit is set"
    print(
        f"{arguments.plan}: {planned.num_ops:,} ops of {planned.num_stages} stages and {planned.num_microbatches} "
        f"micro-batches on {planned.num_ranks} ranks: complete, in order, cannot deadlock, {fits}; "
        f"makespan {timeline.makespan_us:,} µs, bubble {timeline.bubble_fraction:.1%}"
    )
    return 0


def simulate(arguments: Namespace) -> int:
    timeline = simulation.simulate(files.read_plan(arguments.plan))
    _print(timeline)
    if arguments.output is not None:
        files.write(arguments.output, timeline.to_json())
        print(f"Wrote {arguments.output}.")
    return 0


def show(arguments: Namespace) -> int:
    timeline = files.read_timeline(arguments.file)
    if arguments.output is None:
        _print(timeline, arguments.width)
        return 0
    files.require("matplotlib", "draw")
    from rota.drawing import save

    save(timeline, arguments.output)
    print(f"Wrote {arguments.output}.")
    return 0


def run(arguments: Namespace) -> int:
    planned = files.read_plan(arguments.plan)
    files.require("torch", "torch")
    from rota.runtime.launch import launch

    timeline = launch(planned, arguments.script, arguments.arguments)
    if arguments.timeline is not None:
        if timeline is None:
            raise files.InputError(
                f"{arguments.script} ran no step of a Pipeline: there is no timeline to write to {arguments.timeline}"
            )
        files.write(arguments.timeline, timeline.to_json())
        print(f"Wrote {arguments.timeline}; see it by `rota compare {arguments.plan} {arguments.timeline}`.")
    return 0


def compare(arguments: Namespace) -> int:
    planned, measured = files.read_timeline(arguments.planned), files.read_timeline(arguments.measured)
    print(comparison.compare(planned, measured).to_text())
    return 0


def _print(timeline: Timeline, width: int | None = None) -> None:
    from rota.drawing import to_text

    columns = width or max(shutil.get_terminal_size((100, 24)).columns, 20)
    print(to_text(timeline, columns, color=sys.stdout.isatty()))
