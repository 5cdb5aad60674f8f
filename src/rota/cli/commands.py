"""What each command does; heavy libraries are imported inside."""

from __future__ import annotations

import shutil
import sys
from argparse import Namespace

from rota import checking, comparison, schedule_csv, simulation
from rota.cli import files
from rota.costs import Cluster, Costs
from rota.errors import PipelineError
from rota.schedules import NAMED, Family, table
from rota.timeline import Timeline


def demo(arguments: Namespace) -> int:
    files.require("torch", "torch")
    from rota.demo.main import run_demo

    files.make_folder(arguments.output)
    run_demo(arguments.output, arguments.steps)
    return 0


def plan(arguments: Namespace) -> int:
    family = NAMED[arguments.schedule]
    costs = _costs(arguments, family)
    planned = family(family.place(costs, _cluster(arguments, costs)), arguments.microbatches)
    checking.check(planned)
    _print(simulation.simulate(planned))
    if arguments.output is None:
        print("Not written; use -o plan.json to keep it.")
    else:
        text = planned.to_csv() if arguments.output.endswith(".csv") else planned.to_json()
        files.write(arguments.output, text)
        print(f"Wrote {arguments.output}.")
    return 0


def _costs(arguments: Namespace, family: Family) -> Costs:
    """From the file, else uniform, with the backward as the family needs it."""
    if arguments.costs is not None:
        if arguments.stages is not None:
            raise files.InputError(
                f"--stages {arguments.stages} and --costs {arguments.costs}: the file has the stages"
            )
        return _measured(arguments)
    num_stages = arguments.stages or (arguments.ranks or 0) * family.stages_a_rank
    if not num_stages:
        raise files.InputError("how many stages? give --ranks, --stages or --costs")
    return family.adapted(_uniform(arguments, num_stages))


_GUESSES = ("forward_us", "backward_us", "weight_us", "activation_bytes", "boundary_bytes")


def _measured(arguments: Namespace) -> Costs:
    for name in _GUESSES:
        if getattr(arguments, name) is not None:
            option = "--" + name.removesuffix("_bytes").replace("_", "-")
            raise files.InputError(f"{option} and --costs {arguments.costs}: the file has them; leave {option} out")
    return files.read_costs(arguments.costs)


def _uniform(arguments: Namespace, num_stages: int) -> Costs:
    given = {name: getattr(arguments, name) for name in _GUESSES if getattr(arguments, name) is not None}
    return Costs.uniform(num_stages, **given)


def _cluster(arguments: Namespace, costs: Costs) -> Cluster:
    num_ranks = arguments.ranks or costs.num_stages
    return Cluster.uniform(num_ranks, arguments.limit, arguments.latency_us, arguments.bytes_per_us)


def schedules(arguments: Namespace) -> int:
    if arguments.costs is None and arguments.ranks is None:
        raise files.InputError("how many ranks? give --ranks or --costs")
    costs = _measured(arguments) if arguments.costs else _uniform(arguments, arguments.ranks)
    if arguments.ranks not in (None, costs.num_stages):
        raise files.InputError(
            f"{arguments.costs} has {costs.num_stages} stages for --ranks {arguments.ranks}; the table takes one a rank"
        )
    rows = table.compare_schedules(costs, _cluster(arguments, costs), arguments.microbatches, progress=_progress)
    _progress("")
    if arguments.json or arguments.csv:
        print(table.to_json(rows) if arguments.json else table.to_csv(rows), end="")
    else:
        print(table.to_text(rows, arguments.limit))
    return 0


def _progress(doing: str) -> None:
    """One line in a terminal, overwritten; nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{doing and f'planning {doing} …'}", end="", file=sys.stderr, flush=True)


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

    files.require_folder(arguments.output)
    save(timeline, arguments.output)
    print(f"Wrote {arguments.output}.")
    return 0


_WORKERS = {"rota": "rota.runtime.worker", "torch": "rota.interop.torch_worker"}  # by engine


def run(arguments: Namespace) -> int:
    planned = files.read_plan(arguments.plan)
    files.require("torch", "torch")
    from rota.runtime.launch import launch

    files.read(arguments.script)
    if arguments.engine == "torch":
        schedule_csv.require_chain(planned.placement, "or use --engine rota")
    if arguments.timeline is not None:
        if arguments.engine == "torch":
            raise files.InputError(f"--timeline {arguments.timeline}: PyTorch's engine records none; use --engine rota")
        files.require_folder(arguments.timeline)  # before the run, not after it
    timeline = launch(planned, arguments.script, arguments.arguments, worker=_WORKERS[arguments.engine])
    if arguments.timeline is not None:
        if timeline is None:
            raise PipelineError(
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
