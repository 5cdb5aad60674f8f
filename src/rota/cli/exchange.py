"""`rota export` and `rota import`: plans and cuts for torchtitan, Megatron and DeepSpeed, and back."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from rota import checking, cutting
from rota.cli import files
from rota.cli.exchange_arguments import TITAN_LEAVES_NONE
from rota.cli.screen import print_timeline
from rota.costs import Costs, assumed_costs
from rota.plan import Plan
from rota.simulation import simulate

_MOST_LAYOUT_BYTES = 2**20


# --- export -----------------------------------------------------------------------------------------------------------


def export(arguments: Namespace) -> int:
    planned = files.read_plan(arguments.plan)
    checking.check(planned)
    _EXPORTS[arguments.format](arguments, planned)
    return 0


def _to_torchtitan(arguments: Namespace, planned: Plan) -> None:
    from rota.interop import torchtitan

    for name in torchtitan.FILES:  # the folder itself may be there
        files.refuse_taken(Path(arguments.output, name), arguments.force)
    parts = _parts(arguments.model, arguments.cuts or planned.cuts, planned.num_stages)
    texts = torchtitan.render(parts, planned, arguments.output)
    files.make_folder(arguments.output)
    for path, text in texts.items():
        files.write(str(path), text)
        print(f"Wrote {path}.")
    for stage, names in enumerate(parts):
        print(f"stage {stage}: {' '.join(names)}")
    print(f"torchtitan must get {planned.num_microbatches} micro-batches a step; docs/other-trainers.md tells how.")
    print(TITAN_LEAVES_NONE)


def _parts(spec: str, cuts: Sequence[str] | None, num_stages: int) -> tuple[tuple[str, ...], ...]:
    """By CutPoints where the model has some; else a stage begins with each of the modules in `cuts`."""
    from rota.cli.models import load_model_shape

    model = load_model_shape(spec)
    from rota.interop import module_parts, parts_beginning_with
    from rota.models import split
    from rota.models.cutpoint import find_cut_points

    if find_cut_points(model):
        chosen = None if cuts is None else [int(cut) if cut.isdecimal() else cut for cut in cuts]
        return module_parts(model, split(model, num_stages, chosen))
    if cuts is None:
        raise files.InputError(
            f"--model {spec}: the model has no CutPoint; give --cuts, the module that each stage after the first "
            f"begins with, such as --cuts layers.2,layers.4"
        )
    return parts_beginning_with(model, cuts)


def _to_megatron(arguments: Namespace, planned: Plan) -> None:
    from rota.interop import megatron

    remedy = "give --boundaries, where E, each t and L count as one"
    if (arguments.type is None) is not (arguments.layers is None):
        raise files.InputError("--type and --layers go together; give both, or --boundaries alone")
    if arguments.layers is not None and arguments.mtp:
        raise files.InputError(
            "--layers cannot tell layers of multi-token prediction; give --mtp with --boundaries alone"
        )
    if arguments.layers is not None:
        boundaries = arguments.boundaries or _planned_boundaries(arguments, planned, "give --boundaries too")
        layout = megatron.layout_of_layers(planned, boundaries, arguments.layers, arguments.type)
    elif arguments.boundaries is not None:
        layout = megatron.layout_for(planned, arguments.boundaries, arguments.mtp)
    else:
        cut = _listed(_planned_boundaries(arguments, planned, remedy))
        raise files.InputError(
            f"which of the layers that {arguments.plan} cuts at {cut} are transformer layers? Give --layers and --type"
            f", such as --layers 'Embed,Block*8,Norm,Head' --type block, or {remedy}"
        )
    text = megatron.write_layout(layout)
    mtp = f" --mtp-num-layers {arguments.mtp}" if arguments.mtp else ""
    print(
        f"--num-layers {layout.num_layers}{mtp} --pipeline-model-parallel-size {layout.num_ranks} "
        f'--pipeline-model-parallel-layout "{text}"'
    )
    if not megatron.runs_in_this_order(planned):
        print("Megatron does these stages in its own order, (interleaved) 1F1B, not in the plan's.")
    _write(arguments, text + "\n")


def _to_deepspeed(arguments: Namespace, planned: Plan) -> None:
    from rota.interop import deepspeed

    remedy = "give --boundaries, or --type and --layers"
    if (arguments.type is None) is not (arguments.layers is None):
        raise files.InputError(f"--type and --layers go together; {remedy}")
    if arguments.boundaries is not None:
        boundaries = arguments.boundaries
    elif arguments.type is not None:
        boundaries = cutting.by_regex(arguments.layers, arguments.type, planned.num_stages)
    else:
        boundaries = _planned_boundaries(arguments, planned, remedy)
        _tell_cut(boundaries, "each of autoplan's layers is taken for one of the PipelineModule")
    text = deepspeed.write_boundaries(deepspeed.boundaries_for(planned, boundaries))
    for stage, (before, after) in enumerate(pairwise(boundaries)):
        print(f"stage {stage}: layers {before} to {after - 1}" if before < after else f"stage {stage}: no layer")
    if deepspeed.is_uniform(boundaries):
        print('PipelineModule(…, partition_method="uniform") makes this cut by itself.')
    if not deepspeed.runs_in_this_order(planned):
        print("DeepSpeed does these stages in its own order, 1F1B, not in the plan's.")
    _write(arguments, text)


def _planned_boundaries(arguments: Namespace, planned: Plan, remedy: str) -> tuple[int, ...]:
    """Where autoplan cut the model."""
    boundaries = None if planned.usage is None else planned.usage.boundaries
    if boundaries is None:
        raise files.InputError(f"where is the cut? {arguments.plan} does not say; {remedy}")
    return boundaries


def _tell_cut(boundaries: Sequence[int], taken: str) -> None:
    print(f"Cut as planned, at the boundaries {_listed(boundaries)}: {taken}; where it is not, give --boundaries.")


def _listed(boundaries: Sequence[int]) -> str:
    return ",".join(map(str, boundaries))


def _write(arguments: Namespace, text: str) -> None:
    if arguments.output is None:
        print(f"Not written; use -o to keep: {text}", end="")
        return
    files.write(arguments.output, text)
    print(f"Wrote {arguments.output}.")


_EXPORTS: dict[str, Callable[[Namespace, Plan], None]] = {
    "torchtitan": _to_torchtitan,
    "megatron": _to_megatron,
    "deepspeed": _to_deepspeed,
}


# --- import -----------------------------------------------------------------------------------------------------------


def import_(arguments: Namespace) -> int:
    costs = None if arguments.costs is None else files.read_costs(arguments.costs)
    planned, boundaries = _IMPORTS[arguments.format](arguments, costs)
    checking.check(planned)
    print_timeline(simulate(planned))
    print(f"Cut at the boundaries {_listed(boundaries)}.")
    if arguments.output is None:
        print("Not written; use -o plan.json to keep it.")
    else:
        files.write(arguments.output, planned.to_json())
        print(f"Wrote {arguments.output}.")
    return 0


def _from_torchtitan(arguments: Namespace, costs: Costs | None) -> tuple[Plan, Sequence[int]]:
    from rota.interop import torchtitan

    imported = torchtitan.load(arguments.file, costs)
    for stage, names in enumerate(imported.parts):
        print(f"stage {stage}: {' '.join(names)}")
    return imported.plan, imported.boundaries


def _from_megatron(arguments: Namespace, costs: Costs | None) -> tuple[Plan, Sequence[int]]:
    from rota.interop import cuts, megatron

    text = cuts.read_limited(arguments.file, _MOST_LAYOUT_BYTES)
    with files.named(arguments.file):
        layout = megatron.read_layout(text, arguments.ranks)
    for stage, letters in enumerate(layout.stages):
        print(f"stage {stage} on rank {layout.ranks[stage]}: {letters or 'empty'}")
    costs = costs or assumed_costs(len(layout.stages))
    return megatron.plan_of(layout, costs, arguments.microbatches), layout.boundaries


def _from_deepspeed(arguments: Namespace, costs: Costs | None) -> tuple[Plan, Sequence[int]]:
    from rota.interop import cuts, deepspeed

    text = cuts.read_limited(arguments.file, _MOST_LAYOUT_BYTES)
    with files.named(arguments.file):
        boundaries = deepspeed.read_boundaries(text)
    costs = costs or assumed_costs(len(boundaries) - 1)
    return deepspeed.plan_of(boundaries, costs, arguments.microbatches), boundaries


_IMPORTS: dict[str, Callable[[Namespace, Costs | None], tuple[Plan, Sequence[int]]]] = {
    "torchtitan": _from_torchtitan,
    "megatron": _from_megatron,
    "deepspeed": _from_deepspeed,
}
