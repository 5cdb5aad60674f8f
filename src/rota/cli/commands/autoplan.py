"""`rota autoplan`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

import click

from rota.calibration.planning_again import free_name
from rota.cli import common, files, json_reports
from rota.cli.command import Options, Value, command
from rota.cli.exportable import refuse_cuts
from rota.cli.json_reports import print_json
from rota.cli.requirements import InputError, require
from rota.cli.screen import note, print_snapshots, print_timeline, progress_line, terminal_columns
from rota.cli.snapshots import in_host_memory
from rota.cli.values import COUNTS, LINK, MEMORY
from rota.core.cluster import Cluster, Link
from rota.core.errors import PipelineError, PlacementError
from rota.core.layers import ESTIMATED, LayerCosts
from rota.core.profiles import Profile
from rota.core.units import size_text

if TYPE_CHECKING:
    from rota.planning import Answer, Machine
    from rota.planning.model_file import ModelFile

_SEARCH = 0.45  # of the time that is left after measuring: the rest is for steps of the best plans
_LEAST_S = 0.2
_LEAST_SEARCH_S = 3.0  # even if measuring took all of the time: without a plan the measurements would be lost


def _slowdowns(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} must be numbers, one per rank, such as 1,1,1.5,1.5") from None


@command("rota autoplan model.py --ranks 8 --memory 40GB --batch 512 -o plan.json")
@common.argument(
    "model",
    required=False,
    metavar="[MODEL.py]",
    help="Python file that defines make_model(), make_batch(rows), loss_fn and optionally make_optimizer(parameters); "
    "or hf:config.json for a language model from Hugging Face transformers; not required with --profile",
)
@common.model
@common.count("--ranks", required=True, help="total number of processes")
@common.count("--batch", required=True, help="rows (samples) per step, over all replicas")
@click.option(
    "--memory",
    type=MEMORY,
    metavar="SIZE",
    help="memory limit per rank, such as 40GB, or 80% for that share of the device's memory (default: none)",
)
@common.snapshots
@common.file("--profile", help="use costs from `rota profile` (default: measure or estimate them)")
@click.option(
    "--device",
    metavar="NAME",
    help="estimate costs for this device, such as h100 (default: measure them on this machine)",
)
@click.option(
    "--rows",
    type=COUNTS,
    metavar="N,N,…",
    help="numbers of rows per micro-batch to choose from, such as 1,2,4 (default: 1,2,4,8, or those in --profile)",
)
@click.option(
    "--link",
    type=LINK,
    metavar="LINK",
    help="latency and rate between ranks, such as 5us,50GB/s (default: measured if MODEL.py runs on this machine; "
    "otherwise transfers take no time)",
)
@common.count("--node", help="ranks per node (default: all ranks on one node)")
@click.option(
    "--node-link",
    type=LINK,
    metavar="LINK",
    help="latency and rate between nodes, such as 20us,12GB/s (default: same as --link)",
)
@common.file("--links", help="use measured links from `rota profile links -o cluster.json` (default: as set by --link)")
@click.option(
    "--slowdowns",
    type=Value("slowdowns", _slowdowns),
    metavar="X,…",
    help="slowdown of each rank relative to the measured device, such as 1,1,1.5,1.5 (default: all 1)",
)
@common.flag("--inference", help="plan forward passes only")
@common.flag(
    "--exportable",
    help="consider only plans that `rota export` can write for other trainers: no recomputation, one rank per stage",
)
@common.flag(
    "--whole-backward",
    help="consider only schedules that run each backward pass as a whole (B), for trainers that cannot split the "
    "backward pass of a model under torch.compile or with activation checkpointing",
)
@common.flag(
    "--copies",
    help="consider also plans that hold every weight twice, each stage on two ranks: bidirectional ones, such as "
    "Chimera and DualPipe",
)
@common.count("--pipeline", help="ranks per pipeline; the remaining ranks run replicas of it (default: the fastest)")
@common.time_limit("time limit in seconds for measuring, searching and trying the best plans (default: 60)", 60.0)
@common.cache
@common.json
@common.output("FILE", "write the plan as JSON")
def autoplan(options: Options) -> None:
    """Plan everything for a model and its devices: cuts, replicas, micro-batches, schedule."""
    if options.model is None and options.profile is None:
        raise InputError("nothing to plan; give MODEL.py, or --profile with a file from `rota profile`, or both")
    began_s = time.monotonic()  # loading torch takes seconds of the limit
    from rota import planning
    from rota.planning.deadline import Deadline

    if options.snapshots and options.device not in (None, "cpu"):
        raise InputError(f"--snapshots: {in_host_memory(options.device)}")
    if options.copies and (options.exportable or options.inference):
        other = "--exportable" if options.exportable else "--inference"
        raise InputError(f"--copies: with {other}, no plan has a stage on two ranks; leave one of them out")
    deadline = Deadline(options.time_limit, None, began_s)
    machine = _machine(options)
    model_file = None
    if options.model is not None:
        model_file = _model_file(options)
        from rota.planning import on_this_machine
    confirms = model_file is not None and options.device in (None, "cpu") and not options.inference
    with progress_line() as show:
        profiles: Mapping[int, LayerCosts]
        remarks: list[str] = []
        if options.profile is None:
            assert model_file is not None
            how = {"device": options.device, "cache": options.cache, "refresh": options.refresh, "cuts": options.cuts}
            sizes = options.rows or (), options.batch, options.pipeline or options.ranks
            profiles, remarks = on_this_machine.profile_in_time(model_file, *sizes, deadline, show, **how)
        else:
            profiles = _read(options)
            if options.snapshots and (origin := next(iter(profiles.values())).note).startswith(ESTIMATED):
                raise InputError(f"--snapshots: {in_host_memory(origin.removeprefix(ESTIMATED + ' for '))}")
        if options.exportable:
            refuse_cuts(profiles)
        links_because = ""
        if confirms and _wants_links_here(options):
            kept = options.cache, options.refresh
            machine, links_because, doubts = on_this_machine.with_links(machine, *kept, deadline, show)
            remarks += doubts
        if all(layers.num_layers == 1 for layers in profiles.values()) and machine.num_ranks > 1:
            note(
                "autoplan",
                "warning: the model has no place where it can be cut, so there is no pipeline, only "
                "replicas; name modules that can start a stage, such as --cuts 'layers.*', or call a separate "
                "rota.CutPoint() between every two blocks in the model's forward: x = self.cuts[i](x)",
            )
        least_s = _LEAST_SEARCH_S if options.profile is None else _LEAST_S
        answer = planning.autoplan(
            profiles,
            machine,
            options.batch,
            inference=options.inference,
            recompute=not options.exportable,
            copies=options.copies,
            split_backward=not options.whole_backward,
            snapshots=options.snapshots,
            pipeline_ranks=options.pipeline,
            time_limit_s=max(deadline.left_s * (_SEARCH if confirms else 1), least_s),
            progress=show,
        )
        answer = replace(answer, remarks=(*remarks, *answer.remarks), links_because=links_because)
        if confirms:
            assert model_file is not None
            elsewhere = "" if options.node is None else "its ranks are on several nodes"
            answer = on_this_machine.confirmed_in_time(answer, model_file, deadline, show, elsewhere)
        elif options.inference or options.device not in (None, "cpu"):
            answer = replace(answer, predicted_because=_not_run(options))
    if not options.json:
        _print_answer(answer, options)
        return
    print_json(json_reports.of_answer(answer))
    if options.output is not None:
        files.write(options.output, answer.plan.to_json(), quietly=True)


def _print_answer(answer: Answer, options: Options) -> None:
    print(answer.to_text(terminal_columns()), end="\n\n")
    print_timeline(answer.timeline, may_be_free=True)  # that is in the answer, with the reason
    print_snapshots(answer.timeline)
    if options.output is None:
        files.keep(None, "", "plan.json")
        return
    files.write(options.output, answer.plan.to_json(), quietly=True)  # whatever the model does when it is tried again
    then = _next_commands(answer, options)
    usage = answer.plan.usage
    if usage is not None and usage.num_replicas > 1:
        then += (
            f"\nThe plan has {usage.num_replicas} replicas: give rota.Pipeline mesh=rota.mesh() in the script,\n"
            "and each replica rows of its own: pipeline.sampler(dataset) gives them"
        )
    print(f"Wrote {options.output}. Next{then}.")


def _next_commands(answer: Answer, options: Options) -> str:
    """What to do with the plan: on this machine, or where the ranks for which it is planned are."""
    plan, model = options.output, options.model or "MODEL.py"
    script = "infer.py" if options.inference else "train.py"
    train = f"  rota run {plan} {script}    # {'run the model' if options.inference else 'train'} with it\n"
    if not options.inference:
        train = f"  rota verify {plan} {model}    # check that the split model is exact\n" + train
    in_script = (
        f"In {script}, plan = rota.given_plan() is this plan, and its stages are\n"
        "  rota.split(model, plan.num_stages, plan.cuts, example=make_batch(1)[0])\n"
        "An nn.Sequential needs no example"
    )
    if options.exportable and not options.inference:
        titan = free_name("titan")
        train += f"  rota export torchtitan {plan} --model {model}:make_model -o {titan}    # or megatron, deepspeed\n"
    elsewhere = _why_elsewhere(answer, options)
    where = f", on the machines that the plan is for ({elsewhere})" if elsewhere else ""
    return f"{where}:\n{train}{in_script}"


def _why_elsewhere(answer: Answer, options: Options) -> str:
    """Why the plan is not for this machine; "" if it may be."""
    from rota.runtime.host_memory import total_bytes

    usage = answer.plan.usage
    if usage is not None and usage.is_estimate:
        return f"the plan is {usage.note}, not measured here"
    if options.node is not None and options.node < options.ranks:
        return "its ranks are on several nodes"
    needed, there_is = sum(answer.timeline.peak_memory_bytes), total_bytes()
    if usage is not None:
        needed *= usage.num_replicas
    if there_is is not None and needed > there_is:
        return f"its ranks need {size_text(needed)}, and this machine has {size_text(there_is)}"
    return ""


def _machine(options: Options) -> Machine:
    from rota.planning import Machine

    if options.node_link is not None and options.node is None:
        raise InputError("--node-link is between nodes; give the ranks per node with --node")
    link: Link | Cluster = Link(*(options.link or ()))
    if options.links is not None:
        if options.link is not None or options.node is not None:
            raise InputError(f"--links {options.links} has all links; leave --link and --node out")
        link = files.read_cluster(options.links)
    try:
        return Machine(
            options.ranks,
            _limit_bytes(options),
            link,
            options.node,
            None if options.node_link is None else Link(*options.node_link),
            options.slowdowns or (),
        )
    except PlacementError as error:
        raise InputError(f"the machine: {error}") from None


def _limit_bytes(options: Options) -> int | None:
    """What `--memory` gives each rank; a share is one of its device's memory."""
    if not isinstance(options.memory, Fraction):
        limit: int | None = options.memory
        return limit
    if options.profile is not None and options.device is None:
        raise InputError("--memory: a share of which device's memory? give it in GB, or name the device with --device")
    require("torch", "torch")
    from rota.profiling.places import memory_bytes_per_rank

    try:
        return int(options.memory * memory_bytes_per_rank(options.device, options.node or options.ranks))
    except PipelineError as error:
        raise InputError(f"--memory: {error}") from None


def _model_file(options: Options) -> ModelFile:
    require("torch", "torch")
    from rota.planning.model_file import load_model_file

    path = options.model
    if path.lower().endswith(".json") and not path.startswith("hf:"):
        raise InputError(
            f"{path} is not a Python file; give a profile with --profile {path}, or a transformers config as hf:{path}"
        )
    return load_model_file(path, options.length)


def _read(options: Options) -> Mapping[int, LayerCosts]:
    """The layers' costs from `--profile`, at the sizes of `--rows`."""
    profile = files.read(options.profile, Profile.from_json)
    for num_rows in options.rows or ():
        if num_rows not in profile:
            there = ", ".join(map(str, profile))
            raise InputError(
                f"--rows {num_rows}: {options.profile} has only {there}; run `rota profile` with `--rows {num_rows}`"
            )
    return {n: layers for n, layers in profile.items() if not options.rows or n in options.rows}


def _wants_links_here(options: Options) -> bool:
    """Whether the links are asked for that are between processes of this machine."""
    stated = any(getattr(options, option) is not None for option in ("link", "links", "node"))
    return options.ranks > 1 and not stated and not options.slowdowns


def _not_run(options: Options) -> str:
    if options.inference:
        return "the plan has forward passes only"
    return f"the plan is for {options.device}"
