"""`rota import`: plans from configurations of torchtitan, Megatron and DeepSpeed, timelines from PyTorch's traces."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click

from rota import accounting
from rota.cli import common, files, reports
from rota.cli.command import Group, Options, combined, command
from rota.cli.reports import print_json
from rota.cli.screen import print_text, print_timeline, progress_line, report_columns
from rota.core import reading, simulation
from rota.core.costs import Costs, assumed_costs
from rota.core.plan import Plan
from rota.core.simulation import simulate
from rota.core.text import count_text


@click.group("import", cls=Group)
def import_plan() -> None:
    """Read a plan from torchtitan, Megatron or DeepSpeed, or a timeline from PyTorch's traces."""


_microbatches = common.count("--microbatches", metavar="M", required=True, help="micro-batches per step")
_costs_and_output = combined(
    common.file("--costs", help="costs per stage or per layer (default: forward 1 ms, backward 2 ms per stage)"),
    common.json,
    common.output("FILE", "write the plan as JSON"),
)


@command("rota import torchtitan titan/parallelism.json --costs costs.json -o plan.json", group=import_plan)
@common.argument("file", help="parallelism.json, or another config's section parallelism as JSON")
@_costs_and_output
def torchtitan(options: Options) -> None:
    """Read the modules of each stage from a config's fields, and the schedule CSV next to it."""
    from rota.interop import torchtitan

    imported = torchtitan.load(options.file, _costs(options))
    _check_and_write(options, imported.plan, imported.boundaries, [" ".join(part) for part in imported.parts])


@command(
    "rota import megatron layout.txt --ranks 2 --microbatches 8 --costs costs.json -o plan.json", group=import_plan
)
@common.argument("file", help="text file that contains only the layout, such as Et*3|(tt|)*29,m|L")
@common.count("--ranks", required=True, help="Megatron's --pipeline-model-parallel-size")
@_microbatches
@_costs_and_output
def megatron(options: Options) -> None:
    """Read a --pipeline-model-parallel-layout and make the plan that Megatron runs."""
    from rota.interop import megatron

    costs = _costs(options)
    text = reading.read_text(options.file)
    with files.named(options.file):
        layout = megatron.read_layout(text, options.ranks)
    planned = megatron.plan_of(layout, costs or assumed_costs(len(layout.stages)), options.microbatches)
    _check_and_write(options, planned, layout.boundaries, [letters or "empty" for letters in layout.stages])


@command("rota import deepspeed parts.json --microbatches 8 --costs costs.json -o plan.json", group=import_plan)
@common.argument("file", help="JSON file with PipelineModule.parts, a list such as [0, 4, 8]")
@_microbatches
@_costs_and_output
def deepspeed(options: Options) -> None:
    """Read a PipelineModule's boundaries and make the plan that DeepSpeed runs."""
    from rota.interop import deepspeed

    costs = _costs(options)
    text = reading.read_text(options.file)
    with files.named(options.file):
        boundaries = deepspeed.read_boundaries(text)
    planned = deepspeed.plan_of(boundaries, costs or assumed_costs(len(boundaries) - 1), options.microbatches)
    _check_and_write(options, planned, boundaries, [])


@command("rota import trace rank*.json.gz -o timeline.json", group=import_plan)
@common.argument(
    "traces",
    nargs=-1,
    required=True,
    metavar="TRACE...",
    help="trace of one rank from torch.profiler, .json or .json.gz; give one file per rank",
)
@common.natural("--step", help="number of the profiled step, counted from 0 (default: the last)")
@common.cores
@common.json
@common.output("FILE", "write the timeline as JSON", writes="timeline")
def trace(options: Options) -> None:
    """Turn torch.profiler traces of PyTorch's pipeline engine into a timeline, and explain it."""
    from rota.interop import import_traces

    with progress_line(f"reading {count_text(len(options.traces), 'trace')} …") as show:
        imported = import_traces(options.traces, options.step, options.cores)
        show("simulating what would help …")
        explanation = accounting.explain(imported.timeline, imported.timeline.plan)
    if options.json:
        print_json(reports.of_trace(imported) | json.loads(explanation.to_json()))
    else:
        print_text(imported.to_text())
        print()
        print(explanation.to_text(report_columns()))
    then = f"; see it with `rota show {options.output} -o timeline.html`"
    files.keep(options.output, imported.timeline.to_json(), "timeline.json", then, quietly=options.json)


def _costs(options: Options) -> Costs | None:
    return None if options.costs is None else files.read_costs(options.costs)


def _check_and_write(options: Options, planned: Plan, boundaries: Sequence[int], contents: Sequence[str]) -> None:
    """Check the plan, report it, with what each stage holds (empty: unknown), and write it."""
    simulation.check(planned)
    timeline = simulate(planned)
    if options.json:
        fields = {"boundaries": list(boundaries), "contents": list(contents)}
        print_json(fields | reports.of_timeline(timeline))
    else:
        for stage, held in enumerate(contents):
            print_text(f"stage {stage} on rank {planned.placement.ranks_of(stage)[0]}: {held}")
        print_timeline(timeline)
        print_text(f"Cut at the boundaries {','.join(map(str, boundaries))}.")
    files.keep(options.output, planned.to_json(), "plan.json", quietly=options.json)
