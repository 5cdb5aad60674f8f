"""`rota import`: plans from configurations of torchtitan, Megatron and DeepSpeed, timelines from PyTorch's traces."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence

from rota import accounting, checking
from rota.cli import files, json_reports
from rota.cli.arguments import add_cores, add_json, add_output, comma_separated, number
from rota.cli.json_reports import print_json
from rota.cli.parser import Command, Parser
from rota.cli.screen import print_text, print_timeline, progress_line, report_columns
from rota.costs import Costs, assumed_costs
from rota.plan import Plan
from rota.simulation import simulate
from rota.units import count_text

_MOST_LAYOUT_BYTES = 2**20


def add_arguments(parser: Parser) -> None:
    """Add one subcommand per format to the parser of `rota import`."""
    parser.add_commands(_FORMATS, metavar="FORMAT", dest="format", required=True)


def _add_torchtitan(parser: Parser) -> None:
    parser.add_argument("file", help="the job config (.toml), or its parallelism section as .json")
    _add_costs_and_output(parser)


def _add_megatron(parser: Parser) -> None:
    parser.add_argument("file", help="text file that contains only the layout, such as Et*3|(tt|)*29,m|L")
    parser.add_argument(
        "--ranks", type=int, metavar="N", required=True, help="Megatron's --pipeline-model-parallel-size"
    )
    parser.add_argument("--microbatches", type=int, metavar="M", required=True, help="micro-batches per step")
    _add_costs_and_output(parser)


def _add_deepspeed(parser: Parser) -> None:
    parser.add_argument("file", help="JSON file with PipelineModule.parts, a list such as [0, 4, 8]")
    parser.add_argument("--microbatches", type=int, metavar="M", required=True, help="micro-batches per step")
    _add_costs_and_output(parser)


def _add_trace(parser: Parser) -> None:
    help_text = "trace of one rank from torch.profiler, .json or .json.gz; give one file per rank"
    parser.add_argument("traces", nargs="+", metavar="TRACE", help=help_text)
    help_text = "number of the profiled step, counted from 0 (default: the last)"
    parser.add_argument("--step", type=number(0), metavar="N", help=help_text)
    add_cores(parser, "unknown; traces do not record it")
    add_json(parser)
    add_output(parser, "FILE", "write the timeline as JSON", writes="timeline")


def _add_costs_and_output(parser: Parser) -> None:
    help_text = "costs per stage or per layer (default: forward 1 ms, backward 2 ms per stage)"
    parser.add_argument("--costs", metavar="FILE", help=help_text)
    add_json(parser)
    add_output(parser, "FILE", "write the plan as JSON")


def _from_torchtitan(arguments: Namespace) -> int:
    from rota.interop import torchtitan

    imported = torchtitan.load(arguments.file, _costs(arguments))
    return _check_and_write(arguments, imported.plan, imported.boundaries, [" ".join(part) for part in imported.parts])


def _from_megatron(arguments: Namespace) -> int:
    from rota.interop import layer_boundaries, megatron

    costs = _costs(arguments)
    text = layer_boundaries.read_limited(arguments.file, _MOST_LAYOUT_BYTES)
    with files.named(arguments.file):
        layout = megatron.read_layout(text, arguments.ranks)
    planned = megatron.plan_of(layout, costs or assumed_costs(len(layout.stages)), arguments.microbatches)
    stages = [letters or "empty" for letters in layout.stages]
    return _check_and_write(arguments, planned, layout.boundaries, stages)


def _from_deepspeed(arguments: Namespace) -> int:
    from rota.interop import deepspeed, layer_boundaries

    costs = _costs(arguments)
    text = layer_boundaries.read_limited(arguments.file, _MOST_LAYOUT_BYTES)
    with files.named(arguments.file):
        boundaries = deepspeed.read_boundaries(text)
    planned = deepspeed.plan_of(boundaries, costs or assumed_costs(len(boundaries) - 1), arguments.microbatches)
    return _check_and_write(arguments, planned, boundaries, [])


def _from_trace(arguments: Namespace) -> int:
    """Print the traces as one timeline and explain it; write it to --output."""
    from rota.interop import import_traces

    with progress_line() as show:
        show(f"reading {count_text(len(arguments.traces), 'trace')} …")
        imported = import_traces(arguments.traces, arguments.step, arguments.cores)
        show("simulating what would help …")
        explanation = accounting.explain(imported.timeline, imported.timeline.plan)
    if arguments.json:
        print_json(json_reports.of_trace(imported) | json.loads(explanation.to_json()))
    else:
        print_text(imported.to_text())
        print()
        print(explanation.to_text(report_columns()))
    then = f"; see it with `rota show {arguments.output} -o timeline.html`"
    files.keep(arguments.output, imported.timeline.to_json(), "timeline.json", then, quietly=arguments.json)
    return 0


def _costs(arguments: Namespace) -> Costs | None:
    return None if arguments.costs is None else files.read_costs(arguments.costs)


def _check_and_write(arguments: Namespace, planned: Plan, boundaries: Sequence[int], contents: Sequence[str]) -> int:
    """Check the plan, report it, with what each stage holds (empty: unknown), and write it."""
    checking.check(planned)
    timeline = simulate(planned)
    if arguments.json:
        fields = {"boundaries": list(boundaries), "contents": list(contents)}
        print_json(fields | json_reports.of_timeline(timeline))
    else:
        for stage, held in enumerate(contents):
            print_text(f"stage {stage} on rank {planned.placement.ranks_of(stage)[0]}: {held}")
        print_timeline(timeline)
        print_text(f"Cut at the boundaries {comma_separated(boundaries)}.")
    files.keep(arguments.output, planned.to_json(), "plan.json", quietly=arguments.json)
    return 0


_FORMATS = (
    Command(
        "torchtitan",
        "read the modules of each stage from a job config, and the schedule CSV next to it",
        "rota import torchtitan titan/parallelism.toml --costs costs.json -o plan.json",
        _add_torchtitan,
        _from_torchtitan,
    ),
    Command(
        "megatron",
        "read a --pipeline-model-parallel-layout and make the plan that Megatron runs",
        "rota import megatron layout.txt --ranks 2 --microbatches 8 --costs costs.json -o plan.json",
        _add_megatron,
        _from_megatron,
    ),
    Command(
        "deepspeed",
        "read a PipelineModule's boundaries and make the plan that DeepSpeed runs",
        "rota import deepspeed parts.json --microbatches 8 --costs costs.json -o plan.json",
        _add_deepspeed,
        _from_deepspeed,
    ),
    Command(
        "trace",
        "turn torch.profiler traces of PyTorch's pipeline engine into a timeline, and explain it",
        "rota import trace rank*.json.gz -o timeline.json",
        _add_trace,
        _from_trace,
    ),
)

COMMAND = Command(
    "import",
    "read a plan from torchtitan, Megatron or DeepSpeed, or a timeline from PyTorch's traces",
    "rota import torchtitan titan/parallelism.toml --costs costs.json -o plan.json",
    add_arguments,
)
