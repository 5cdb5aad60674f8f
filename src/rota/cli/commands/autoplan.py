"""`rota autoplan`."""

from __future__ import annotations

import time
from fractions import Fraction
from typing import TYPE_CHECKING

import click

from rota.cli import common, files, reports
from rota.cli.command import Options, Value, command
from rota.cli.common import parse_memory
from rota.cli.reports import print_json
from rota.cli.requirements import InputError, require
from rota.cli.screen import print_timeline, progress_line, terminal_columns
from rota.core.cluster import Cluster, Link
from rota.core.errors import PipelineError, PlacementError
from rota.core.layers import Profile
from rota.core.text import size_text

if TYPE_CHECKING:
    from rota.planning import Answer, Machine
    from rota.planning.autoplanning import Job
    from rota.planning.model_file import ModelFile


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
    type=Value("memory", parse_memory),
    metavar="SIZE",
    help="memory limit per rank, such as 40GB, or 80% for that share of the device's memory (default: none)",
)
@common.file("--profile", help="use costs from `rota profile` (default: measure or estimate them)")
@click.option(
    "--device",
    metavar="NAME",
    help="estimate costs for this device, such as h100 (default: measure them on this machine)",
)
@common.counts(
    "--rows",
    help="numbers of rows per micro-batch to choose from, such as 1,2,4 (default: 1,2,4,8, or those in --profile)",
)
@common.link(
    "--link",
    help="latency and rate between ranks, such as 5us,50GB/s (default: measured if MODEL.py runs on this machine; "
    "otherwise transfers take no time)",
)
@common.count("--node", help="ranks per node (default: all ranks on one node)")
@common.link("--node-link", help="latency and rate between nodes, such as 20us,12GB/s (default: same as --link)")
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
@common.time_limit(
    default=60.0, help="time limit in seconds for measuring, searching and trying the best plans (default: 60)"
)
@common.cache
@common.json
@common.output("FILE", "write the plan as JSON")
def autoplan(options: Options) -> None:
    """Plan everything for a model and its devices: cuts, replicas, micro-batches, schedule."""
    began_s = time.monotonic()  # loading torch takes seconds of the limit
    from rota.planning.autoplanning import plan_here
    from rota.planning.request import Deadline

    job = _job(options)
    with progress_line() as show:
        answer = plan_here(job, Deadline(options.time_limit, None, began_s), show)
    if options.output is not None:
        files.write(options.output, answer.plan.to_json(), quietly=True)
    if options.json:
        print_json(reports.of_answer(answer))
        return
    print(answer.to_text(terminal_columns()), end="\n\n")
    print_timeline(answer.timeline, may_be_free=True)  # that is in the answer, with the reason
    if options.output is None:
        files.keep(None, "", "plan.json")
    else:
        print(f"Wrote {options.output}. Next{_next_commands(answer, options)}")


def _job(options: Options) -> Job:
    from rota.planning.autoplanning import Job
    from rota.planning.request import Choices, Measuring

    if options.model is None and options.profile is None:
        raise InputError("nothing to plan; give MODEL.py, or --profile with a file from `rota profile`, or both")
    if options.copies and (options.exportable or options.inference):
        other = "--exportable" if options.exportable else "--inference"
        raise InputError(f"--copies: with {other}, no plan has a stage on two ranks; leave one of them out")
    predicted_because = f"the plan is for {options.device}" if options.device not in (None, "cpu") else ""
    has_links = any(value is not None for value in (options.link, options.links, options.node, options.slowdowns))
    return Job(
        _machine(options),
        options.batch,
        Choices(
            options.inference, not options.exportable, options.pipeline, options.copies, not options.whole_backward
        ),
        None if options.model is None else _model_file(options),
        None if options.profile is None else _profile(options),
        options.rows or (),
        Measuring(options.device, cache=options.cache, refresh=options.refresh, cuts=options.cuts),
        wants_links=options.ranks > 1 and not has_links,
        elsewhere="" if options.node is None else "its ranks are on several nodes",
        predicted_because="the plan has forward passes only" if options.inference else predicted_because,
    )


def _machine(options: Options) -> Machine:
    from rota.planning import Machine

    if options.node_link is not None and options.node is None:
        raise InputError("--node-link is between nodes; give the ranks per node with --node")
    link: Link | Cluster = Link(*(options.link or ()))
    if options.links is not None:
        if options.link is not None or options.node is not None:
            raise InputError(f"--links {options.links} has all links; leave --link and --node out")
        link = files.read_cluster(options.links)
    node_link = None if options.node_link is None else Link(*options.node_link)
    try:
        return Machine(options.ranks, _limit_bytes(options), link, options.node, node_link, options.slowdowns or ())
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
    from rota.profiling.devices import memory_bytes_per_rank

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


def _profile(options: Options) -> Profile:
    """The layers' costs from `--profile`, at the sizes of `--rows`."""
    profile = files.read(options.profile, Profile.from_json)
    for num_rows in options.rows or ():
        if num_rows not in profile:
            sizes = ", ".join(map(str, profile))
            raise InputError(
                f"--rows {num_rows}: {options.profile} has only {sizes}; run `rota profile` with `--rows {num_rows}`"
            )
    return Profile(tuple(layers for rows, layers in profile.items() if not options.rows or rows in options.rows))


def _next_commands(answer: Answer, options: Options) -> str:
    """What to do with the plan: on this machine, or where the ranks for which it is planned are."""
    plan, model, script = options.output, options.model or "MODEL.py", "infer.py" if options.inference else "train.py"
    lines = [f"  rota run {plan} {script}    # {'run the model' if options.inference else 'train'} with it"]
    if not options.inference:
        lines.insert(0, f"  rota verify {plan} {model}    # check that the split model is exact")
        if options.exportable:
            export = f"rota export torchtitan {plan} --model {model}:make_model -o titan"
            lines.append(f"  {export}    # or megatron, deepspeed")
    lines += [
        f"In {script}, plan = rota.given_plan() is this plan, and its stages are",
        "  rota.split(model, plan.num_stages, plan.cuts, example=make_batch(1)[0])",
    ]
    if answer.plan.num_replicas > 1:
        lines += [
            f"The plan has {answer.plan.num_replicas} replicas: give rota.Pipeline mesh=rota.mesh(), and each replica "
            f"rows",
            "of its own: pipeline.sampler(dataset) gives them",
        ]
    elsewhere = _why_elsewhere(answer, options)
    return "\n".join([f", on the machines that the plan is for ({elsewhere}):" if elsewhere else ":", *lines])


def _why_elsewhere(answer: Answer, options: Options) -> str:
    """Why the plan is not for this machine; "" if it may be."""
    from rota.runtime.host_memory import total_bytes

    usage = answer.plan.usage
    if usage is not None and usage.is_estimate:
        return f"the plan is {usage.note}, not measured here"
    if options.node is not None and options.node < options.ranks:
        return "its ranks are on several nodes"
    needed = sum(answer.timeline.peak_memory_bytes) * answer.plan.num_replicas
    total = total_bytes()
    if total is not None and needed > total:
        return f"its ranks need {size_text(needed)}, and this machine has {size_text(total)}"
    return ""
