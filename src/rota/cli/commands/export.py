"""`rota export`: plans and cuts for torchtitan, Megatron and DeepSpeed."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from rota import checking, cutting
from rota.cli import files
from rota.cli.arguments import add_json, add_output, argument_type, comma_separated
from rota.cli.json_reports import print_json
from rota.cli.parser import Command, Parser
from rota.cli.requirements import InputError, require
from rota.cli.screen import print_text, progress_line
from rota.cli.titan_parts import LEAVES_NONE, checked_parts, titan_parts
from rota.errors import SplitError
from rota.plan import Plan
from rota.tasks import Kind
from rota.units import count_text

_SPLIT = (
    "The plan splits each backward into I and W, which PyTorch cannot do under torch.compile or with activation "
    "checkpointing: leave both off, or export a plan with whole backwards "
    "(`rota autoplan … --whole-backward`)."
)
_WHOLE = (
    "The plan's backwards are whole, so torch.compile may be on. Activation checkpointing may be on as well, but the "
    "plan includes its time and memory only if the layers were profiled with it."
)


def add_arguments(parser: Parser) -> None:
    """Add one subcommand per format to the parser of `rota export`."""
    parser.add_commands(_FORMATS, metavar="FORMAT", dest="format", required=True)


def _add_torchtitan(parser: Parser) -> None:
    parser.add_argument("plan", help="plan.json, or a schedule CSV")
    help_text = "function that returns the model"
    parser.add_argument("--model", required=True, metavar="FILE.py:FUNCTION", help=help_text)
    help_text = (
        "CutPoints to cut at, by number or name; in models without any, the modules that start stages (default: the "
        "plan's cuts; if it has none, evenly spaced CutPoints)"
    )
    parser.add_argument("--cuts", type=argument_type(_split), metavar="NAME,…", help=help_text)
    help_text = (
        "export even if stages of this model fail without the modules of other stages; useful, for example, if "
        "torchtitan trains its own model with the same module names"
    )
    parser.add_argument("--unchecked", action="store_true", help=help_text)
    add_json(parser)
    add_output(parser, "FOLDER", "folder for the files; created if missing", required=True, writes="files in a folder")


def _add_megatron(parser: Parser) -> None:
    parser.add_argument("plan", help="plan.json, or a schedule CSV")
    help_text = (
        "boundaries of the stages: 0, the first layer of each later stage, and the number of layers; "
        "a layer is one letter of Megatron's layout (E, t, m, L) or, with --layers, one class name "
        "(default with --layers: those of a plan from `rota autoplan`)"
    )
    parser.add_argument("--boundaries", type=_integers, metavar="0,N,…", help=help_text)
    help_text = (
        "class names of the layers, in order; those before the transformer layers are the embedding (E), those after "
        "them the loss (L)"
    )
    parser.add_argument("--layers", type=_layers, metavar="NAME*N,…", help=help_text)
    help_text = "with --layers: regular expression that matches part of the class names of transformer layers"
    parser.add_argument("--type", metavar="REGEX", help=help_text)
    help_text = "number of multi-token-prediction layers (default: 0)"
    parser.add_argument("--mtp", type=int, default=0, metavar="N", help=help_text)
    add_json(parser)
    add_output(parser, "FILE", "write the layout")


def _add_deepspeed(parser: Parser) -> None:
    parser.add_argument("plan", help="plan.json, or a schedule CSV")
    help_text = (
        "boundaries of the stages: 0, the first layer of each later stage, and the number of layers (default: those "
        "of a plan from `rota autoplan`)"
    )
    parser.add_argument("--boundaries", type=_integers, metavar="0,N,…", help=help_text)
    help_text = (
        "instead of --boundaries: give each stage the same number of layers whose class name contains a "
        "match for this regular expression"
    )
    parser.add_argument("--type", metavar="REGEX", help=help_text)
    help_text = "with --type: class names of the layers, in order"
    parser.add_argument("--layers", type=_layers, metavar="NAME*N,…", help=help_text)
    add_json(parser)
    add_output(parser, "FILE", "write the boundaries as JSON")


def _split(text: str) -> list[str]:
    """The words between commas."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise ValueError(f"{text!r} has an empty entry; write, for example, a,b")
    return words


@argument_type
def _integers(text: str) -> list[int]:
    """Numbers of layers, such as 0,4,8."""
    words = _split(text)
    for word in words:
        if not (word.isascii() and word.isdecimal() and len(word) < 10):
            raise ValueError(f"{word!r} in {text!r} is not a number of layers; write, for example, 0,4,8")
    return [*map(int, words)]


@argument_type
def _layers(text: str) -> list[str]:
    """Names of layers; Block*8 is eight of them."""
    layers: list[str] = []
    for word in _split(text):
        name, star, times = word.partition("*")
        if not name or (star and not (times.isascii() and times.isdecimal() and len(times) < 6)):
            raise ValueError(f"{word!r} is not a layer; write, for example, Block, or Block*8 for eight of them")
        layers += [name] * (int(times) if star else 1)
    return layers


def _checked_plan(arguments: Namespace) -> Plan:
    """The plan to export. Raises PlanError if it must not run, PlacementError if its micro-batches differ."""
    planned = files.read_plan(arguments.plan)
    checking.check(planned)
    planned.placement.require_alike("rota export")
    return planned


def _to_torchtitan(arguments: Namespace) -> int:
    planned = _checked_plan(arguments)
    from rota.interop import torchtitan

    for name in torchtitan.FILES:  # the folder itself may exist
        files.refuse_taken(Path(arguments.output, name), arguments.force)
    require("torch", "torch")
    from rota.planning.model_file import load_exported_model

    exported = load_exported_model(arguments.model)
    parts = titan_parts(exported, arguments.cuts or planned.cuts, planned.num_stages)
    try:
        with progress_line() as show:
            show(f"running the {count_text(len(parts), 'stage')} of {exported.path}, each without the others …")
            checked = LEAVES_NONE if arguments.unchecked else checked_parts(exported, parts)
    except SplitError as error:
        raise InputError(f"--model {exported.path}: {error}") from None
    texts = torchtitan.render(parts, planned, arguments.output)
    files.make_folder(arguments.output)
    for path, text in texts.items():
        files.write(str(path), text, quietly=arguments.json)
    splits = any(task.kind is Kind.W for task in planned.placement.tasks)
    if arguments.json:
        print_json(
            {
                "files": [*map(str, texts)],
                "stages": [list(names) for names in parts],
                "num_microbatches": planned.num_microbatches,
                "microbatch_rows": planned.microbatch_rows,
                "num_replicas": torchtitan.replicas_of(planned),
                "splits_backward": splits,
                "checked": checked,
            }
        )
        return 0
    for stage, names in enumerate(parts):
        print_text(f"stage {stage}: {' '.join(names)}")
    print_text(f"Give torchtitan {torchtitan.batch_text(planned)}.")
    if torchtitan.replicas_of(planned) > 1:
        print_text(f"{torchtitan.degrees_text(planned)}.")
    print_text(checked)
    print_text(_SPLIT if splits else _WHOLE)
    _print_launch(planned, arguments.output)
    return 0


def _print_launch(planned: Plan, folder: str) -> None:
    """Print the launch command for each version of torchtitan."""
    from rota.interop import torchtitan

    launch = f"torchrun --nproc_per_node {planned.num_ranks * torchtitan.replicas_of(planned)} -m torchtitan.train"
    rows = planned.microbatch_rows
    size = f"--training.local_batch_size {rows * planned.num_microbatches} " if rows else ""
    print_text(
        f"To launch it with torchtitan 0.3, write a planned.py with a function that returns "
        f'rota.interop.with_plan(config, "{folder}") for a config of torchtitan\'s registry:'
    )
    print(f"  {launch} --module planned --config FUNCTION activation-checkpoint:none")
    print_text(
        f"With torchtitan 0.2, planned.py registers the model's spec with rota.interop.in_planned_order, and JOB.toml "
        f"has the section [parallelism] of {Path(folder, 'parallelism.toml')}:"
    )
    print(f"  {launch} --job.config_file JOB.toml --experimental.custom_import planned \\")
    print(f"      {size}--activation_checkpoint.mode none")
    print_text('The page "For GPUs: torchtitan end to end" of Rota\'s documentation has planned.py for both.')


def _to_megatron(arguments: Namespace) -> int:
    planned = _checked_plan(arguments)
    from rota.interop import megatron

    remedy = "give --boundaries, in which E, each t, and L count as one layer each"
    if (arguments.type is None) is not (arguments.layers is None):
        raise InputError("--type and --layers go together; give both, or only --boundaries")
    if arguments.layers is not None and arguments.mtp:
        raise InputError("--layers cannot mark layers of multi-token prediction; give --mtp with only --boundaries")
    if arguments.layers is not None:
        boundaries = arguments.boundaries or _planned_boundaries(arguments, planned, "give --boundaries too")
        layout = megatron.layout_of_layers(planned, boundaries, arguments.layers, arguments.type)
    elif arguments.boundaries is not None:
        layout = megatron.layout_for(planned, arguments.boundaries, arguments.mtp)
    else:
        cut = comma_separated(_planned_boundaries(arguments, planned, remedy))
        raise InputError(
            f"which of the layers that {arguments.plan} cuts at {cut} are transformer layers? Give --layers and --type"
            f", such as --layers 'Embed,Block*8,Norm,Head' --type block, or {remedy}"
        )
    text = megatron.write_layout(layout)
    mtp = f" --mtp-num-layers {arguments.mtp}" if arguments.mtp else ""
    options = (
        f"--num-layers {layout.num_layers}{mtp} --pipeline-model-parallel-size {layout.num_ranks} "
        f'--pipeline-model-parallel-layout "{text}"'
    )
    own_order = not megatron.runs_in_this_order(planned)
    if arguments.json:
        fields = {"options": options, "layout": text, "num_ranks": layout.num_ranks, "runs_in_own_order": own_order}
        return _report(arguments, fields, text + "\n")
    print(options)
    if own_order:
        print_text("Megatron runs these stages in its own order, (interleaved) 1F1B, not in the plan's.")
    return _write(arguments, text + "\n")


def _to_deepspeed(arguments: Namespace) -> int:
    planned = _checked_plan(arguments)
    from rota.interop import deepspeed

    remedy = "give --boundaries, or --type and --layers"
    if (arguments.type is None) is not (arguments.layers is None):
        raise InputError(f"--type and --layers go together; {remedy}")
    if arguments.boundaries is not None:
        boundaries = arguments.boundaries
    elif arguments.type is not None:
        boundaries = cutting.by_regex(arguments.layers, arguments.type, planned.num_stages)
    else:
        boundaries = _planned_boundaries(arguments, planned, remedy)
        told = (
            f"The model is cut as planned, at the boundaries {comma_separated(boundaries)}: each of autoplan's layers "
            f"counts as one layer of the PipelineModule; if that is wrong, give --boundaries."
        )
        print_text(told, to_stderr=arguments.json)
    text = deepspeed.write_boundaries(deepspeed.boundaries_for(planned, boundaries))
    is_uniform, own_order = deepspeed.is_uniform(boundaries), not deepspeed.runs_in_this_order(planned)
    if arguments.json:
        fields = {"boundaries": list(boundaries), "is_uniform": is_uniform, "runs_in_own_order": own_order}
        return _report(arguments, fields, text)
    for stage, (before, after) in enumerate(pairwise(boundaries)):
        print(f"stage {stage}: layers {before} to {after - 1}" if before < after else f"stage {stage}: no layers")
    if is_uniform:
        print('PipelineModule(…, partition_method="uniform") makes this cut by itself.')
    if own_order:
        print_text("DeepSpeed runs these stages in its own order, 1F1B, not in the plan's.")
    return _write(arguments, text)


def _planned_boundaries(arguments: Namespace, planned: Plan, remedy: str) -> tuple[int, ...]:
    """The boundaries at which autoplan cut the model."""
    boundaries = None if planned.usage is None else planned.usage.boundaries
    if boundaries is None:
        raise InputError(f"{arguments.plan} does not say where the model is cut; {remedy}")
    return boundaries


def _report(arguments: Namespace, fields: Mapping[str, Any], text: str) -> int:
    """Print what was exported as JSON, and write it to --output."""
    print_json(fields)
    if arguments.output is not None:
        files.write(arguments.output, text, quietly=True)
    return 0


def _write(arguments: Namespace, text: str) -> int:
    if arguments.output is None:
        print(f"The result was not saved; use -o FILE to save it: {text}", end="")
    else:
        files.write(arguments.output, text)
    return 0


_FORMATS = (
    Command(
        "torchtitan",
        "write schedule.csv and the modules of each stage, as torchtitan's config names them",
        "rota export torchtitan plan.json --model model.py:make_model --cuts layers.2,layers.4,layers.6 -o titan",
        _add_torchtitan,
        _to_torchtitan,
        details=f" {LEAVES_NONE}",
    ),
    Command(
        "megatron",
        "write the --pipeline-model-parallel-layout option: the layers of each stage",
        "rota export megatron plan.json --boundaries 0,4,6,8,10 -o layout.txt",
        _add_megatron,
        _to_megatron,
    ),
    Command(
        "deepspeed",
        "write where each stage begins in the PipelineModule's list of layers",
        "rota export deepspeed plan.json --layers 'Embed,Block*8,Norm,Head' --type block -o parts.json",
        _add_deepspeed,
        _to_deepspeed,
    ),
)

COMMAND = Command(
    "export",
    "write a plan for torchtitan, Megatron or DeepSpeed",
    "rota export torchtitan plan.json --model model.py:make_model -o titan",
    add_arguments,
)
