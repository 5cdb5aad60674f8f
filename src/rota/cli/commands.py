"""What each command does; heavy libraries are imported inside."""

from __future__ import annotations

import signal
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from rota import checking, comparison, reading, schedule_csv, simulation
from rota.cli import files
from rota.cli.screen import print_timeline
from rota.errors import PipelineError
from rota.plan import Plan
from rota.timeline import Timeline

if TYPE_CHECKING:
    from rota.runtime.launching.launch import Run


def demo(arguments: Namespace) -> int:
    files.require("torch", "torch")
    from rota.demo.main import run_demo

    files.make_folder(arguments.output)
    run_demo(arguments.output, arguments.steps)
    return 0


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
    tell_replicas(planned, "checked")
    return 0


def tell_replicas(planned: Plan, done: str) -> None:
    """A plan is of one pipeline, of which its usage may ask for several."""
    if planned.usage is not None and planned.usage.num_replicas > 1:
        print(f"This {done} one of {planned.usage.num_replicas} replicas: all of them run the same pipeline.")


def simulate(arguments: Namespace) -> int:
    timeline = simulation.simulate(files.read_plan(arguments.plan))
    print_timeline(timeline)
    if arguments.output is not None:
        files.write(arguments.output, timeline.to_json())
        print(f"Wrote {arguments.output}.")
    return 0


def show(arguments: Namespace) -> int:
    timeline = files.read_timeline(arguments.file)
    if arguments.output is not None:
        above = None if arguments.above is None else files.read_timeline(arguments.above)
        bound_us = _bound_us(timeline, arguments.file) if arguments.bound else None
        _draw(timeline, arguments.output, above, (str(arguments.above), arguments.file), bound_us)
    elif arguments.above is not None or arguments.bound:
        option = "--bound" if arguments.above is None else f"--above {arguments.above}"
        raise files.InputError(f"{option} is for pictures: name one by -o, such as -o plan.html")
    else:
        print_timeline(timeline, arguments.width)
    return 0


def _bound_us(timeline: Timeline, name: str) -> int:
    """Of the plan's own costs: what was measured may beat it."""
    if _is_measured(timeline):
        raise files.InputError(f"--bound: {name} has measured times, the bound has planned ones; show the plan instead")
    files.require("ortools", "search")
    from rota.search import bounds_of

    return bounds_of(timeline.plan.placement, timeline.plan.num_microbatches)[0].us


def _draw(
    timeline: Timeline, output: str, above: Timeline | None, names: tuple[str, str], bound_us: int | None = None
) -> None:
    if not output.lower().endswith((".html", ".json")):
        files.require("matplotlib", "draw")
    from rota.drawing import save

    names = Path(names[0]).name, Path(names[1]).name
    title = " over ".join(names) if above else names[1]
    save(timeline, output, above=above, names=names, title=title, bound_us=bound_us)
    print(f"Wrote {output}.")


_MOST_PROCESSES = 1024  # that `rota run` starts
_WORKERS = {"rota": "rota.runtime.launching.worker", "torch": "rota.interop.torch_worker"}  # by engine


def run(arguments: Namespace) -> int:
    planned = files.read_plan(arguments.plan)
    files.require("torch", "torch")
    from rota.runtime.launching.launch import EndedBySignal, launch

    reading.read_text(arguments.script)
    if arguments.engine == "torch":
        schedule_csv.require_chain(planned.placement, "or use --engine rota")
    replicas = 1 if planned.usage is None else planned.usage.num_replicas
    dp, tp = arguments.mesh.get("dp", replicas), arguments.mesh.get("tp", 1)
    if (pp := arguments.mesh.get("pp", planned.num_ranks)) != planned.num_ranks:
        raise files.InputError(f"--mesh pp={pp}: {arguments.plan} is for {planned.num_ranks} ranks; leave pp out")
    if (num_processes := planned.num_ranks * dp * tp) > _MOST_PROCESSES:
        raise files.InputError(f"--mesh: {num_processes:,} processes on this machine; give {_MOST_PROCESSES:,} at most")
    if arguments.engine == "torch" and dp * tp > 1:
        raise files.InputError(f"--mesh dp={dp},tp={tp}: PyTorch's engine runs one pipeline; use --engine rota")
    if arguments.timeline is not None and arguments.engine == "torch":
        raise files.InputError(f"--timeline {arguments.timeline}: PyTorch's engine records none; use --engine rota")
    for option in ("--timeline", "--force", "--mesh", "--max-restarts", "--timeout", "--engine"):
        if option in arguments.arguments:
            print(f"rota run: {option} behind the script goes to the script; for rota put it first", file=sys.stderr)
    try:
        done = launch(
            planned,
            arguments.script,
            arguments.arguments,
            worker=_WORKERS[arguments.engine],
            dp=dp,
            tp=tp,
            max_restarts=arguments.max_restarts,
            timeout_s=arguments.timeout,
            report=_tell,
        )
    except EndedBySignal as error:
        _tell(str(error))
        return 128 + error.number
    if arguments.timeline is not None:
        if done.timeline is None:
            raise PipelineError(
                f"{arguments.script} ran no step of a Pipeline: there is no timeline to write to {arguments.timeline}"
            )
        files.write(arguments.timeline, done.timeline.to_json())
        print(f"Wrote {arguments.timeline}; see it by `rota compare {arguments.plan} {arguments.timeline}`.")
    return _told_how_it_went(done, arguments.timeline)


def _told_how_it_went(done: Run, timeline: str | None) -> int:
    """The exit code: as the shell has it for who was ended by SIGTERM; SIGUSR1 asks for no more than an early end."""
    for straggler in done.stragglers:
        first = "" if timeline else "measure by --timeline measured.json, and "
        _tell(
            f"{straggler.to_text()}; {first}plan with measured costs: rota calibrate {timeline or 'measured.json'} "
            f"-o better.json"
        )
    if done.ended_by is None:
        return 0
    _tell(f"{done.ended_by.name}: all ranks have ended after the step that was running")
    return 128 + done.ended_by if done.ended_by == signal.SIGTERM else 0


def _tell(line: str) -> None:
    print(f"rota run: {line}", file=sys.stderr, flush=True)


def compare(arguments: Namespace) -> int:
    planned, measured = files.read_timeline(arguments.planned), files.read_timeline(arguments.measured)
    if _is_measured(planned):
        if not _is_measured(measured):
            raise files.InputError(
                f"{arguments.planned} has measured times, {arguments.measured} planned ones: the plan comes first, as "
                f"in `rota compare {arguments.measured} {arguments.planned}`"
            )
        print(f"rota compare: {arguments.planned} has measured times, which count as planned here", file=sys.stderr)
    print(comparison.compare(planned, measured, arguments.cores).to_text())
    if arguments.output is not None:
        _draw(measured, arguments.output, planned, (arguments.planned, arguments.measured))
    return 0


def _is_measured(timeline: Timeline) -> bool:
    """Whether its times are others than those of its plan's own costs."""
    return timeline != simulation.simulate(timeline.plan)
