"""`rota import`: plans from the configurations of torchtitan, Megatron and DeepSpeed."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from rota import checking
from rota.cli import files, json_reports
from rota.cli.arguments import add_json, add_output, comma_separated
from rota.cli.json_reports import print_json
from rota.cli.parser import Command, Parser
from rota.cli.screen import print_text, print_timeline
from rota.costs import Costs, assumed_costs
from rota.plan import Plan
from rota.simulation import simulate

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
)

COMMAND = Command(
    "import",
    "read a plan from torchtitan, Megatron or DeepSpeed",
    "rota import torchtitan titan/parallelism.toml --costs costs.json -o plan.json",
    add_arguments,
)
