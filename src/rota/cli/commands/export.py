"""`rota export`: plans and cuts for torchtitan, Megatron and DeepSpeed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rota.cli import common, files
from rota.cli.command import Decorator, Group, Options, Value, command
from rota.cli.common import parse_words
from rota.cli.reports import print_json
from rota.cli.requirements import InputError, require
from rota.cli.screen import print_text, progress_line
from rota.core import simulation
from rota.core.errors import FormatError, PipelineError, SplitError
from rota.core.plan import Plan
from rota.core.tasks import Kind
from rota.core.text import count_text

if TYPE_CHECKING:
    from rota.interop.modules import Parts
    from rota.planning.model_file import ExportedModel

_SPLIT = (
    "The plan splits each backward into I and W, which PyTorch cannot do under torch.compile or with activation "
    "checkpointing: leave both off, or export a plan with whole backwards "
    "(`rota autoplan … --whole-backward`)."
)
_WHOLE = (
    "The plan's backwards are whole, so torch.compile may be on. Activation checkpointing may be on as well, but the "
    "plan includes its time and memory only if the layers were profiled with it."
)

#: A requirement of torchtitan that not every model meets.
_LEAVES_NONE = (
    "In each stage, torchtitan replaces the modules of other stages with None, so the model's "
    "forward must skip them, as the forward of torchtitan's own models does."
)


@click.group(cls=Group)
def export() -> None:
    """Write a plan for torchtitan, Megatron or DeepSpeed."""


_plan = common.argument("plan", help="plan.json, or a schedule CSV")


def _integers(text: str) -> list[int]:
    """Numbers of layers, such as 0,4,8."""
    words = parse_words(text)
    for word in words:
        if not (word.isascii() and word.isdecimal() and len(word) < 10):
            raise ValueError(f"{word!r} in {text!r} is not a number of layers; write, for example, 0,4,8")
    return [*map(int, words)]


def _layers(text: str) -> list[str]:
    """Names of layers; Block*8 is eight of them."""
    layers: list[str] = []
    for word in parse_words(text):
        name, star, times = word.partition("*")
        if not name or (star and not (times.isascii() and times.isdecimal() and len(times) < 6)):
            raise ValueError(f"{word!r} is not a layer; write, for example, Block, or Block*8 for eight of them")
        layers += [name] * (int(times) if star else 1)
    return layers


def _boundaries(default: str) -> Decorator[Any]:
    """--boundaries; `default` says what holds without it."""
    help_text = f"boundaries of the stages: 0, the first layer of each later stage, and the number of layers{default}"
    return click.option("--boundaries", type=Value("boundaries", _integers), metavar="0,N,…", help=help_text)


def _checked_plan(options: Options) -> Plan:
    """The plan to export. Raises PlanError if it must not run, PlacementError if its micro-batches differ."""
    planned = files.read_plan(options.plan)
    simulation.check(planned)
    planned.placement.require_alike("rota export")
    return planned


@command(
    "rota export torchtitan plan.json --model model.py:make_model --cuts layers.2,layers.4,layers.6 -o titan",
    group=export,
)
@_plan
@click.option("--model", required=True, metavar="FILE.py:FUNCTION", help="function that returns the model")
@common.cuts(
    metavar="NAME,…",
    help="CutPoints to cut at, by number or name; in models without any, the modules that start stages (default: the "
    "plan's cuts; if it has none, evenly spaced CutPoints)",
)
@common.flag(
    "--unchecked",
    help="export even if stages of this model fail without the modules of other stages; useful, for example, if "
    "torchtitan trains its own model with the same module names",
)
@common.json
@common.output("FOLDER", "folder for the files; created if missing", required=True, writes="files in a folder")
def torchtitan(options: Options) -> None:
    """Write schedule.csv and the modules of each stage, as torchtitan's config names them.

    In each stage, torchtitan replaces the modules of other stages with None, so the model's forward must skip them, as
    the forward of torchtitan's own models does.
    """
    planned = _checked_plan(options)
    from rota.interop import torchtitan

    for name in torchtitan.FILES:  # the folder itself may exist
        files.refuse_taken(Path(options.output, name), options.force)
    require("torch", "torch")
    from rota.planning.model_file import load_exported_model

    exported = load_exported_model(options.model)
    parts = _titan_parts(exported, options.cuts or planned.cuts, planned.num_stages)
    try:
        stages = count_text(len(parts), "stage")
        with progress_line(f"running the {stages} of {exported.path}, each without the others …"):
            checked = _LEAVES_NONE if options.unchecked else _checked_parts(exported, parts)
    except SplitError as error:
        raise InputError(f"--model {exported.path}: {error}") from None
    texts = torchtitan.render(parts, planned, options.output)
    files.make_folder(options.output)
    for path, text in texts.items():
        files.write(str(path), text, quietly=options.json)
    splits = any(task.kind is Kind.W for task in planned.placement.tasks)
    if options.json:
        print_json(
            {
                "files": [*map(str, texts)],
                "stages": [list(names) for names in parts],
                "num_microbatches": planned.num_microbatches,
                "microbatch_rows": planned.microbatch_rows,
                "num_replicas": planned.num_replicas,
                "splits_backward": splits,
                "checked": checked,
            }
        )
        return
    for stage, names in enumerate(parts):
        print_text(f"stage {stage}: {' '.join(names)}")
    print_text(f"Give torchtitan {torchtitan.batch_text(planned)}.")
    if planned.num_replicas > 1:
        print_text(f"{torchtitan.degrees_text(planned)}.")
    print_text(checked)
    print_text(_SPLIT if splits else _WHOLE)
    _print_launch(planned, options.output)


def _titan_parts(exported: ExportedModel, cuts: Sequence[str] | None, num_stages: int) -> Parts:
    """Cut at CutPoints if the model has any; otherwise a stage begins with each of the modules in `cuts`."""
    from rota.interop import module_parts, parts_beginning_with
    from rota.models import split
    from rota.models.cutpoint import find_cut_points

    model = exported.model
    if find_cut_points(model):
        chosen = None if cuts is None else [int(cut) if cut.isdecimal() else cut for cut in cuts]
        try:
            model, inputs = exported.with_batch()
        except FormatError as error:
            raise InputError(f"{error}; it is needed to cut a model at its CutPoints") from None
        return module_parts(model, split(model, num_stages, chosen, example=inputs))
    if cuts is None:
        raise InputError(
            f"--model {exported.path}: the model has no CutPoint; give --cuts, the module that each stage after the "
            f"first begins with, such as --cuts layers.2,layers.4"
        )
    return parts_beginning_with(model, cuts)


def _checked_parts(exported: ExportedModel, parts: Parts) -> str:
    """What to print of the check that each stage runs alone. Raises SplitError if one does not."""
    from rota.interop import check_parts

    try:
        model, inputs = exported.with_batch()
        check_parts(model, parts, inputs)
    except SplitError as error:
        remedy = "If torchtitan trains another model with these names, export with --unchecked"
        raise SplitError(f"{error}. {remedy}") from None
    except (FormatError, PipelineError) as error:
        return f"{_LEAVES_NONE} This was not checked: {error}."
    if any(parameter.is_meta for parameter in model.parameters()):
        return (
            "Checked, by shapes only: every stage runs without the modules of the others, and together they give "
            "outputs of the same shapes and dtypes as the model's."
        )
    return (
        "Checked: every stage runs without the modules of the others, and together they compute what the model "
        "computes."
    )


def _print_launch(planned: Plan, folder: str) -> None:
    launch = f"torchrun --nproc_per_node {planned.num_ranks * planned.num_replicas} -m torchtitan.train"
    print_text(
        f"To launch it with torchtitan 0.3 or later, write a planned.py with a function that returns "
        f'rota.interop.with_plan(config, "{folder}") for a config of torchtitan\'s registry:'
    )
    print(f"  {launch} --module planned --config FUNCTION activation-checkpoint:none")
    print_text('The page "For GPUs: torchtitan end to end" of Rota\'s documentation has the whole planned.py.')


@command("rota export megatron plan.json --boundaries 0,4,6,8,10 -o layout.txt", group=export)
@_plan
@_boundaries(
    "; a layer is one letter of Megatron's layout (E, t, m, L) or, with --layers, one class name (default with "
    "--layers: those of a plan from `rota autoplan`)"
)
@click.option(
    "--layers",
    type=Value("layers", _layers),
    metavar="NAME*N,…",
    help="class names of the layers, in order; those before the transformer layers are the embedding (E), those after "
    "them the loss (L)",
)
@click.option(
    "--type",
    metavar="REGEX",
    help="with --layers: regular expression that matches part of the class names of transformer layers",
)
@common.natural("--mtp", default=0, help="number of multi-token-prediction layers (default: 0)")
@common.json
@common.output("FILE", "write the layout")
def megatron(options: Options) -> None:
    """Write the --pipeline-model-parallel-layout option: the layers of each stage."""
    planned = _checked_plan(options)
    from rota.interop import megatron

    remedy = "give --boundaries, in which E, each t, and L count as one layer each"
    if (options.type is None) is not (options.layers is None):
        raise InputError("--type and --layers go together; give both, or only --boundaries")
    if options.layers is not None and options.mtp:
        raise InputError("--layers cannot mark layers of multi-token prediction; give --mtp with only --boundaries")
    if options.layers is not None:
        boundaries = options.boundaries or _planned_boundaries(options, planned, "give --boundaries too")
        layout = megatron.layout_of_layers(planned, boundaries, options.layers, options.type)
    elif options.boundaries is not None:
        layout = megatron.layout_for(planned, options.boundaries, options.mtp)
    else:
        cut = ",".join(map(str, _planned_boundaries(options, planned, remedy)))
        raise InputError(
            f"which of the layers that {options.plan} cuts at {cut} are transformer layers? Give --layers and --type"
            f", such as --layers 'Embed,Block*8,Norm,Head' --type block, or {remedy}"
        )
    text = megatron.write_layout(layout)
    mtp = f" --mtp-num-layers {options.mtp}" if options.mtp else ""
    flags = (
        f"--num-layers {layout.num_layers}{mtp} --pipeline-model-parallel-size {layout.num_ranks} "
        f'--pipeline-model-parallel-layout "{text}"'
    )
    own_order = not megatron.runs_in_this_order(planned)
    if options.json:
        fields = {"options": flags, "layout": text, "num_ranks": layout.num_ranks}
        print_json({**fields, "runs_in_own_order": own_order})
    else:
        print(flags)
        if own_order:
            print_text("Megatron runs these stages in its own order, (interleaved) 1F1B, not in the plan's.")
    _write(options, text + "\n")


@command("rota export deepspeed plan.json --boundaries 0,4,8,10 -o parts.json", group=export)
@_plan
@_boundaries(" (default: those of a plan from `rota autoplan`)")
@common.json
@common.output("FILE", "write the boundaries as JSON")
def deepspeed(options: Options) -> None:
    """Write where each stage begins in the PipelineModule's list of layers."""
    planned = _checked_plan(options)
    from rota.interop import deepspeed

    boundaries = options.boundaries
    if boundaries is None:
        boundaries = _planned_boundaries(options, planned, "give --boundaries")
        note = (
            f"The model is cut as planned, at the boundaries {','.join(map(str, boundaries))}: each of autoplan's "
            f"layers counts as one layer of the PipelineModule; if that is wrong, give --boundaries."
        )
        print_text(note, to_stderr=options.json)
    text = deepspeed.write_boundaries(deepspeed.boundaries_for(planned, boundaries))
    is_uniform, own_order = deepspeed.is_uniform(boundaries), not deepspeed.runs_in_this_order(planned)
    if options.json:
        print_json({"boundaries": [*boundaries], "is_uniform": is_uniform, "runs_in_own_order": own_order})
    else:
        for stage, (before, after) in enumerate(pairwise(boundaries)):
            print(f"stage {stage}: layers {before} to {after - 1}" if before < after else f"stage {stage}: no layers")
        if is_uniform:
            print('PipelineModule(…, partition_method="uniform") makes this cut by itself.')
        if own_order:
            print_text("DeepSpeed runs these stages in its own order, 1F1B, not in the plan's.")
    _write(options, text)


def _planned_boundaries(options: Options, planned: Plan, remedy: str) -> tuple[int, ...]:
    """The boundaries at which autoplan cut the model."""
    boundaries = None if planned.usage is None else planned.usage.boundaries
    if boundaries is None:
        raise InputError(f"{options.plan} does not say where the model is cut; {remedy}")
    return boundaries


def _write(options: Options, text: str) -> None:
    if options.output is not None:
        files.write(options.output, text, quietly=options.json)
    elif not options.json:
        print(f"The result was not saved; use -o FILE to save it: {text}", end="")
