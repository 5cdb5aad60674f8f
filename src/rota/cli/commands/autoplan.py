"""`rota autoplan`."""

from __future__ import annotations

import argparse
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from rota.calibration.planning_again import free_name
from rota.cli import files, json_reports
from rota.cli.arguments import (
    add_cache,
    add_json,
    add_model_options,
    add_output,
    add_snapshots,
    add_time_limit,
    link,
    memory,
    number,
    rows,
)
from rota.cli.exportable import refuse_cuts_of_model, refuse_cuts_of_profile
from rota.cli.json_reports import print_json
from rota.cli.parser import Command, Parser
from rota.cli.requirements import InputError, require
from rota.cli.screen import print_snapshots, print_timeline, progress_line, terminal_columns
from rota.cli.snapshots import in_host_memory
from rota.cluster import Cluster, Link
from rota.errors import PipelineError, PlacementError
from rota.layers import ESTIMATED, LayerCosts
from rota.units import size_text

if TYPE_CHECKING:
    from rota.planning import Answer, Machine
    from rota.planning.deadline import Deadline
    from rota.planning.model_file import ModelFile

_ROWS = (1, 2, 4, 8)  # of a micro-batch, by default
_PER_RANK = 2  # micro-batches of a step, without which a pipeline's ranks wait too much
_PROFILE = 0.4  # of the time limit, for measuring the layers at all numbers of rows that fit
_LINKS = 0.5  # of the time that is left then, for links that were never measured here; then for all-reduces
_SEARCH = 0.45  # of the time that is left after measuring: the rest is for steps of the best plans
_LEAST_S = 0.2
_LEAST_SEARCH_S = 3.0  # even if measuring took all of the time: without a plan the measurements would be lost


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rota autoplan` to its parser."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL.py",
        help="Python file that defines make_model(), make_batch(rows), loss_fn and optionally "
        "make_optimizer(parameters); or hf:config.json for a language model from Hugging Face transformers; "
        "not required with --profile",
    )
    add_model_options(parser)
    parser.add_argument("--ranks", type=number(1), metavar="N", required=True, help="total number of processes")
    parser.add_argument(
        "--batch", type=number(1), metavar="N", required=True, help="rows (samples) per step, over all replicas"
    )
    help_text = "memory limit per rank, such as 40GB, or 80%% for that share of the device's memory (default: none)"
    parser.add_argument("--memory", type=memory, metavar="SIZE", help=help_text)
    add_snapshots(parser)
    help_text = "use costs from `rota profile` (default: measure or estimate them)"
    parser.add_argument("--profile", metavar="FILE", help=help_text)
    help_text = "estimate costs for this device, such as h100 (default: measure them on this machine)"
    parser.add_argument("--device", metavar="NAME", help=help_text)
    help_text = (
        "numbers of rows per micro-batch to choose from, such as 1,2,4 (default: 1,2,4,8, or those in --profile)"
    )
    parser.add_argument("--rows", type=rows, metavar="N,N,…", help=help_text)
    help_text = (
        "latency and rate between ranks, such as 5us,50GB/s (default: measured if MODEL.py runs on this machine; "
        "otherwise transfers take no time)"
    )
    parser.add_argument("--link", type=link, metavar="LINK", help=help_text)
    parser.add_argument("--node", type=number(1), metavar="N", help="ranks per node (default: all ranks on one node)")
    help_text = "latency and rate between nodes, such as 20us,12GB/s (default: same as --link)"
    parser.add_argument("--node-link", type=link, metavar="LINK", help=help_text)
    help_text = "use measured links from `rota profile links -o cluster.json` (default: as set by --link)"
    parser.add_argument("--links", metavar="FILE", help=help_text)
    help_text = "slowdown of each rank relative to the measured device, such as 1,1,1.5,1.5 (default: all 1)"
    parser.add_argument("--slowdowns", type=_slowdowns, default=(), metavar="X,…", help=help_text)
    parser.add_argument("--inference", action="store_true", help="plan forward passes only")
    help_text = (
        "consider only plans that `rota export` can write for other trainers: no recomputation, one rank per stage"
    )
    parser.add_argument("--exportable", action="store_true", help=help_text)
    help_text = (
        "consider only schedules that run each backward pass as a whole (B), for trainers that cannot split the "
        "backward pass of a model under torch.compile or with activation checkpointing"
    )
    parser.add_argument("--whole-backward", action="store_true", help=help_text)
    help_text = (
        "consider also plans that hold every weight twice, each stage on two ranks: bidirectional ones, such as "
        "Chimera and DualPipe"
    )
    parser.add_argument("--copies", action="store_true", help=help_text)
    help_text = "ranks per pipeline; the remaining ranks run replicas of it (default: whichever is fastest)"
    parser.add_argument("--pipeline", type=number(1), metavar="N", help=help_text)
    add_time_limit(
        parser, "time limit in seconds for measuring, searching and trying the best plans (default: 60)", default=60.0
    )
    add_cache(parser)
    add_json(parser)
    add_output(parser, "FILE", "write the plan as JSON")


def _slowdowns(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers, one per rank, such as 1,1,1.5,1.5") from None


def run(arguments: Namespace) -> int:
    """Print the fastest plan found for the model or its profile, and write it to --output. Returns the exit code."""
    if arguments.model is None and arguments.profile is None:
        raise InputError("nothing to plan; give MODEL.py, or --profile with a file from `rota profile`, or both")
    began_s = time.monotonic()  # loading torch takes seconds of the limit
    from rota.planning import autoplan
    from rota.planning.deadline import Deadline

    if arguments.snapshots and arguments.device not in (None, "cpu"):
        raise InputError(f"--snapshots: {in_host_memory(arguments.device)}")
    if arguments.copies and (arguments.exportable or arguments.inference):
        other = "--exportable" if arguments.exportable else "--inference"
        raise InputError(f"--copies: with {other}, no plan has a stage on two ranks; leave one of them out")
    deadline = Deadline(arguments.time_limit, None, began_s)
    machine = _machine(arguments)
    model_file = None if arguments.model is None else _model_file(arguments)
    confirms = model_file is not None and arguments.device in (None, "cpu") and not arguments.inference
    if arguments.exportable and arguments.profile is None:
        assert model_file is not None
        refuse_cuts_of_model(model_file, arguments.cuts)
    with progress_line() as show:
        remarks: list[str] = []
        if arguments.profile is None:
            assert model_file is not None
            profiles = _measured(arguments, model_file, deadline, show, remarks)
        else:
            profiles = _read(arguments)
            if arguments.snapshots and (note := next(iter(profiles.values())).note).startswith(ESTIMATED):
                raise InputError(f"--snapshots: {in_host_memory(note.removeprefix(ESTIMATED + ' for '))}")
            if arguments.exportable:
                refuse_cuts_of_profile(profiles)
        links_because = ""
        if confirms and _wants_links_here(arguments):
            machine, links_because = _machine_here(arguments, machine, deadline, show, remarks)
        if all(layers.num_layers == 1 for layers in profiles.values()) and machine.num_ranks > 1:
            print(
                "rota autoplan: warning: the model has no place where it can be cut, so there is no pipeline, only "
                "replicas; name modules that can start a stage, such as --cuts 'layers.*', or call a separate "
                "rota.CutPoint() between every two blocks in the model's forward: x = self.cuts[i](x)",
                file=sys.stderr,
            )
        least_s = _LEAST_SEARCH_S if arguments.profile is None else _LEAST_S
        answer = autoplan(
            profiles,
            machine,
            arguments.batch,
            inference=arguments.inference,
            recompute=not arguments.exportable,
            copies=arguments.copies,
            split_backward=not arguments.whole_backward,
            snapshots=arguments.snapshots,
            pipeline_ranks=arguments.pipeline,
            time_limit_s=max(deadline.left_s * (_SEARCH if confirms else 1), least_s),
            progress=show,
        )
        answer = replace(answer, remarks=(*remarks, *answer.remarks), links_because=links_because)
        if confirms:
            assert model_file is not None
            answer = _confirmed(answer, model_file, arguments, deadline, show)
        elif arguments.inference or arguments.device not in (None, "cpu"):
            answer = replace(answer, predicted_because=_not_run(arguments))
    if not arguments.json:
        _print_answer(answer, arguments)
        return 0
    print_json(json_reports.of_answer(answer))
    if arguments.output is not None:
        files.write(arguments.output, answer.plan.to_json(), quietly=True)
    return 0


def _print_answer(answer: Answer, arguments: Namespace) -> None:
    print(answer.to_text(terminal_columns()), end="\n\n")
    print_timeline(answer.timeline, free="")  # that is in the answer, with the reason
    print_snapshots(answer.timeline)
    if arguments.output is None:
        files.keep(None, "", "plan.json")
        return
    files.write(arguments.output, answer.plan.to_json(), quietly=True)  # whatever the model does when it is tried again
    then = _next_commands(answer, arguments)
    usage = answer.plan.usage
    if usage is not None and usage.num_replicas > 1:
        then += (
            f"\nThe plan has {usage.num_replicas} replicas: give rota.Pipeline mesh=rota.mesh() in the script,\n"
            "and each replica rows of its own: pipeline.sampler(dataset) gives them"
        )
    print(f"Wrote {arguments.output}. Next{then}.")


def _next_commands(answer: Answer, arguments: Namespace) -> str:
    """What to do with the plan: on this machine, or where the ranks for which it is planned are."""
    plan, model = arguments.output, arguments.model or "MODEL.py"
    script = "infer.py" if arguments.inference else "train.py"
    train = f"  rota run {plan} {script}    # {'run the model' if arguments.inference else 'train'} with it\n"
    if not arguments.inference:
        train = f"  rota verify {plan} {model}    # check that the split model is exact\n" + train
    in_script = (
        f"In {script}, plan = rota.given_plan() is this plan, and its stages are\n"
        "  rota.split(model, plan.num_stages, plan.cuts, example=make_batch(1)[0])\n"
        "An nn.Sequential needs no example"
    )
    if arguments.exportable and not arguments.inference:
        titan = free_name("titan")
        train += f"  rota export torchtitan {plan} --model {model}:make_model -o {titan}    # or megatron, deepspeed\n"
    elsewhere = _why_elsewhere(answer, arguments)
    where = f", on the machines that the plan is for ({elsewhere})" if elsewhere else ""
    return f"{where}:\n{train}{in_script}"


def _why_elsewhere(answer: Answer, arguments: Namespace) -> str:
    """Why the plan is not for this machine; "" if it may be."""
    from rota.runtime.host_memory import total_bytes

    usage = answer.plan.usage
    if usage is not None and usage.is_estimate:
        return f"the plan is {usage.note}, not measured here"
    if arguments.node is not None and arguments.node < arguments.ranks:
        return "its ranks are on several nodes"
    needed, there_is = sum(answer.timeline.peak_memory_bytes), total_bytes()
    if usage is not None:
        needed *= usage.num_replicas
    if there_is is not None and needed > there_is:
        return f"its ranks need {size_text(needed)}, and this machine has {size_text(there_is)}"
    return ""


def _machine(arguments: Namespace) -> Machine:
    from rota.planning import Machine

    if arguments.node_link is not None and arguments.node is None:
        raise InputError("--node-link is between nodes; give the ranks per node with --node")
    link: Link | Cluster = Link(*(arguments.link or ()))
    if arguments.links is not None:
        if arguments.link is not None or arguments.node is not None:
            raise InputError(f"--links {arguments.links} has all links; leave --link and --node out")
        link = files.read_cluster(arguments.links)
    try:
        return Machine(
            arguments.ranks,
            _limit_bytes(arguments),
            link,
            arguments.node,
            None if arguments.node_link is None else Link(*arguments.node_link),
            arguments.slowdowns,
        )
    except PlacementError as error:
        raise InputError(f"the machine: {error}") from None


def _limit_bytes(arguments: Namespace) -> int | None:
    """What `--memory` gives each rank; a share is one of its device's memory."""
    if not isinstance(arguments.memory, Fraction):
        limit: int | None = arguments.memory
        return limit
    if arguments.profile is not None and arguments.device is None:
        raise InputError("--memory: a share of which device's memory? give it in GB, or name the device with --device")
    require("torch", "torch")
    from rota.profiling.places import memory_bytes_per_rank

    try:
        return int(arguments.memory * memory_bytes_per_rank(arguments.device, arguments.node or arguments.ranks))
    except PipelineError as error:
        raise InputError(f"--memory: {error}") from None


def _model_file(arguments: Namespace) -> ModelFile:
    require("torch", "torch")
    from rota.planning.model_file import load_model_file

    path = arguments.model
    if path.lower().endswith(".json") and not path.startswith("hf:"):
        raise InputError(
            f"{path} is not a Python file; give a profile with --profile {path}, or a transformers config as hf:{path}"
        )
    return load_model_file(path, arguments.length)


def _read(arguments: Namespace) -> Mapping[int, LayerCosts]:
    """The layers' costs from `--profile`, at the sizes of `--rows`."""
    profile = files.read_profile(arguments.profile)
    for num_rows in arguments.rows or ():
        if num_rows not in profile:
            there = ", ".join(map(str, profile))
            raise InputError(
                f"--rows {num_rows}: {arguments.profile} has only {there}; run `rota profile` with `--rows {num_rows}`"
            )
    return {n: layers for n, layers in profile.items() if not arguments.rows or n in arguments.rows}


def _measured(
    arguments: Namespace, model_file: ModelFile, deadline: Deadline, show: Callable[[object], None], remarks: list[str]
) -> Mapping[int, LayerCosts]:
    """The layers' costs, measured or estimated; `remarks` gets which numbers of rows were not measured."""
    from rota.planning.model_file import profile_file

    given = arguments.rows or [num_rows for num_rows in _ROWS if arguments.batch % num_rows == 0]
    sizes = by_importance(given, arguments)
    how = {"device": arguments.device, "cache": arguments.cache, "refresh": arguments.refresh, "cuts": arguments.cuts}
    left_s = max(_PROFILE * deadline.seconds - deadline.elapsed_s, 0.0)
    found = profile_file(model_file, sizes, report=show, within_s=left_s, **how)
    if missing := sorted({*sizes} - {*found}):
        remarks.append(
            f"left out for lack of time: micro-batches of {_listed(missing)} rows; give a longer --time-limit"
        )
    return found


def by_importance(sizes: Sequence[int], arguments: Namespace) -> list[int]:
    """The largest size of which each rank of a pipeline gets two or more, the smallest, then the others, largest first.

    Large micro-batches make ops efficient, and the first of them is measured even if no time is left for others.
    """
    ascending = sorted({*sizes})
    ranks = arguments.pipeline or arguments.ranks
    largest = max((rows for rows in ascending if arguments.batch >= _PER_RANK * ranks * rows), default=ascending[0])
    return list(dict.fromkeys([largest, ascending[0], *reversed(ascending)]))


def _listed(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sizes))


def _wants_links_here(arguments: Namespace) -> bool:
    """Whether the links are asked for that are between processes of this machine."""
    stated = any(getattr(arguments, option) is not None for option in ("link", "links", "node"))
    return arguments.ranks > 1 and not stated and not arguments.slowdowns


def _machine_here(
    arguments: Namespace,
    machine: Machine,
    deadline: Deadline,
    show: Callable[[object], None],
    remarks: list[str],
) -> tuple[Machine, str]:
    """The machine with links between CPUs of this one, on which plans are tried; and why they were not measured."""
    from rota.profiling.forked import why_not_here
    from rota.profiling.machine_links import measured_on_this_machine
    from rota.runtime.device.local import CPU

    if why_not_here(arguments.ranks):
        return machine, "this takes a core per rank"
    folder = arguments.cache if arguments.cache is not None and not arguments.cache.endswith(".json") else None
    show("measuring the links between processes")
    try:
        found = measured_on_this_machine(
            arguments.ranks,
            device=CPU,
            cache=folder,
            refresh=arguments.refresh,
            report=show,
            within_s=_LINKS * deadline.left_s,
        )
    except PipelineError as error:
        return machine, str(error)
    if found.doubt:
        remarks.append(f"links were measured on a busy machine: {found.doubt}")
    return replace(machine, link=found.cluster), ""


def _not_run(arguments: Namespace) -> str:
    if arguments.inference:
        return "the plan has forward passes only"
    return f"the plan is for {arguments.device}"


def _confirmed(
    answer: Answer,
    model_file: ModelFile,
    arguments: Namespace,
    deadline: Deadline,
    show: Callable[[object], None],
) -> Answer:
    from rota.planning.confirmation import confirm

    show("making the model")
    functions = model_file.make_batch, model_file.loss_fn, model_file.make_optimizer
    elsewhere = "" if arguments.node is None else "its ranks are on several nodes"
    model = model_file.make_model()  # which may take long
    time_limit_s = max(deadline.left_s, _LEAST_S)
    return confirm(answer, model, *functions, report=show, time_limit_s=time_limit_s, elsewhere=elsewhere)


COMMAND = Command(
    "autoplan",
    "plan everything for a model and its devices: cuts, replicas, micro-batches, schedule",
    "rota autoplan model.py --ranks 8 --memory 40GB --batch 512 -o plan.json",
    add_arguments,
    run,
)
