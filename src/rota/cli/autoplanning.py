"""`rota autoplan`."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rota import reading
from rota.cli import files
from rota.cli.screen import print_timeline, show_progress
from rota.costs import Cluster, Link
from rota.errors import PlacementError
from rota.layers import LayerCosts

if TYPE_CHECKING:
    from rota.planning.answer import Answer
    from rota.planning.machine import Machine
    from rota.planning.model_file import ModelFile

_ANY_LINK = (0, None)
_ROWS = (1, 2, 4, 8)  # of a micro-batch, where nothing else is asked for


def autoplan(arguments: Namespace) -> int:
    if arguments.model is None and arguments.profile is None:
        raise files.InputError("what is to be planned? give MODEL.py, or --profile of `rota profile`, or both")
    from rota.planning.autoplanning import autoplan as find

    machine = _machine(arguments)
    model_file = None if arguments.model is None else _model_file(arguments.model)
    try:
        profiles = _measured(arguments, model_file) if arguments.profile is None else _read(arguments)
        if all(layers.num_layers == 1 for layers in profiles.values()) and machine.num_ranks > 1:
            print(
                "rota autoplan: warning: the model has no place where it may be cut, so there is no pipeline, only "
                "replicas: call a rota.CutPoint() of its own between blocks in its forward, x = self.cuts[i](x)",
                file=sys.stderr,
            )
        answer = find(
            profiles,
            machine,
            arguments.batch,
            inference=arguments.inference,
            recompute=not arguments.exportable,
            copies=not arguments.exportable,
            pipeline_ranks=arguments.pipeline,
            time_limit_s=arguments.time_limit,
            progress=show_progress,
        )
        if model_file is not None and arguments.device in (None, "cpu") and not arguments.inference:
            answer = _confirmed(answer, model_file)
    finally:
        show_progress("")
    _tell(answer, arguments)
    return 0


def _tell(answer: Answer, arguments: Namespace) -> None:
    print_timeline(answer.timeline)
    print(answer.to_text())
    if arguments.output is None:
        print("Not written; use -o plan.json to keep it.")
    else:
        files.write(arguments.output, answer.plan.to_json())
        print(f"Wrote {arguments.output}; use it by `rota run {arguments.output} train.py`. There, the model is cut by")
        print("rota.split(model, plan.num_stages, plan.cuts), of plan = rota.given_plan().")


def _machine(arguments: Namespace) -> Machine:
    from rota.planning.machine import Machine

    if arguments.node_link is not None and arguments.node is None:
        raise files.InputError("--node-link is between nodes: say how many ranks one has, by --node")
    link: Link | Cluster = Link(*arguments.link)
    if arguments.links is not None:
        if arguments.link != _ANY_LINK or arguments.node is not None:
            raise files.InputError(f"--links {arguments.links} has all links; leave --link and --node out")
        link = files.read_cluster(arguments.links)
    try:
        return Machine(
            arguments.ranks,
            arguments.memory,
            link,
            arguments.node,
            None if arguments.node_link is None else Link(*arguments.node_link),
            arguments.slowdowns,
        )
    except PlacementError as error:
        raise files.InputError(f"the machine: {error}") from None


def _model_file(path: str) -> ModelFile:
    files.require("torch", "torch")
    from rota.planning.model_file import load_model_file

    reading.read_text(path)
    if path.lower().endswith(".json"):
        raise files.InputError(f"{path} is no Python file; a profile is given by --profile {path}")
    return load_model_file(path)


def _read(arguments: Namespace) -> Mapping[int, LayerCosts]:
    """From `--profile`, those of `--rows`."""
    profile = files.read_profile(arguments.profile)
    for rows in arguments.rows or ():
        if rows not in profile:
            there = ", ".join(map(str, profile))
            raise files.InputError(f"--rows {rows}: {arguments.profile} has {there}; profile it with `--rows {rows}`")
    return {rows: layers for rows, layers in profile.items() if not arguments.rows or rows in arguments.rows}


def _measured(arguments: Namespace, model_file: ModelFile | None) -> Mapping[int, LayerCosts]:
    assert model_file is not None
    from rota.planning.model_file import profile_file

    rows = arguments.rows or [rows for rows in _ROWS if arguments.batch % rows == 0]
    how = {"device": arguments.device, "cache": arguments.cache, "refresh": arguments.refresh}
    return profile_file(model_file, rows, report=show_progress, **how)


def _confirmed(answer: Answer, model_file: ModelFile) -> Answer:
    from rota.planning.confirming import confirm

    functions = model_file.make_batch, model_file.loss_fn, model_file.make_optimizer
    return confirm(answer, model_file.make_model(), *functions, report=show_progress)
