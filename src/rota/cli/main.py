"""The commands and their help, and how errors are told."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence

from rota.cli import (
    arguments,
    autoplanning,
    calibrating,
    checkpoints,
    commands,
    exchange,
    exchange_arguments,
    explaining,
    files,
    planning,
    profiling,
    rehearsing,
)
from rota.cli.interrupts import told_at_once
from rota.cli.parser import Parser
from rota.errors import PipelineError, PlanError, RotaError
from rota.reading import printable

_DESCRIPTION = """Pipeline-parallel training of PyTorch models that runs as planned.

  rota demo                                          see it all once, on this machine
  rota plan 1f1b --ranks 4 --microbatches 8 -o plan.json
  rota autoplan model.py --ranks 4 --batch 32 -o plan.json
  rota show plan.json
  rota run plan.json train.py                        train.py calls rota.given_plan()
"""


_Command = tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int], str, str]
_COMMANDS: dict[str, _Command] = {
    "demo": (arguments.demo, commands.demo, "train a small GPT on 4 processes, planned against measured", "rota demo"),
    "autoplan": (
        arguments.autoplan,
        autoplanning.autoplan,
        "choose cuts, replicas, micro-batches, recomputation and schedule together, for a model and a machine",
        "rota autoplan model.py --ranks 8 --memory 40GB --batch 512 -o plan.json",
    ),
    "profile": (
        arguments.profile,
        profiling.profile,
        "what each layer of a model takes, measured here or estimated for a device; or how fast links are",
        "rota profile model.py --rows 1,2,4,8 -o profile.json\n  rota profile links --processes 4 -o cluster.json",
    ),
    "plan": (
        arguments.plan,
        planning.plan,
        "make a plan, by name or by search, check it and show it",
        "rota plan 1f1b --ranks 4 --microbatches 8 --forward-us 100 --backward-us 200 -o plan.json",
    ),
    "schedules": (
        arguments.schedules,
        planning.schedules,
        "all named schedules side by side: time, bubble, memory, what fits",
        "rota schedules --ranks 8 --microbatches 24 --forward-us 1000 --backward-us 2000 --activation 1GB --limit 8GB",
    ),
    "bound": (
        arguments.bound,
        planning.bound,
        "how far a plan is at most from the best possible, and why",
        "rota bound plan.json",
    ),
    "frontier": (
        arguments.frontier,
        planning.frontier,
        "what memory buys: the least time a micro-batch for each memory limit",
        "rota frontier --shape wave --ranks 8 --forward-us 93 --backward-us 91 --weight-us 47 --activation 2",
    ),
    "check": (
        arguments.check,
        commands.check,
        "refuse a plan that is wrong, could hang or would not fit",
        "rota check plan.json",
    ),
    "simulate": (
        arguments.simulate,
        commands.simulate,
        "what a plan takes if everything takes what it should",
        "rota simulate plan.json -o timeline.json",
    ),
    "rehearse": (
        arguments.rehearse,
        rehearsing.rehearse,
        "run a plan with real processes and messages, and timed waits in place of compute",
        "rota rehearse plan.json --steps 5 -o rehearsed.json",
    ),
    "show": (arguments.show, commands.show, "a plan or timeline as a chart", "rota show plan.json -o plan.html"),
    "explain": (
        arguments.explain,
        explaining.explain,
        "why ranks are idle, worst first, and what would help",
        "rota explain timeline.json",
    ),
    "run": (
        arguments.run,
        commands.run,
        "start a script on every rank of a plan, on this machine",
        "rota run --timeline measured.json plan.json train.py --steps 100",
    ),
    "compare": (
        arguments.compare,
        commands.compare,
        "planned against measured",
        "rota compare plan.json measured.json",
    ),
    "calibrate": (
        arguments.calibrate,
        calibrating.calibrate,
        "plan anew by what a run has measured, or keep the plan",
        "rota calibrate measured.json -o better.json",
    ),
    "import-trace": (
        arguments.import_trace,
        explaining.import_trace,
        "torch.profiler traces of PyTorch's pipeline engine as a timeline, explained",
        "rota import-trace rank*.json.gz -o timeline.json",
    ),
    "export": (
        exchange_arguments.export,
        exchange.export,
        "a plan and its cut for torchtitan, Megatron or DeepSpeed",
        "rota export torchtitan plan.json --model model.py:make_model -o titan",
    ),
    "import": (
        exchange_arguments.import_,
        exchange.import_,
        "a cut and its plan from torchtitan, Megatron or DeepSpeed",
        "rota import torchtitan titan/parallelism.toml --costs costs.json -o plan.json",
    ),
    "checkpoint": (
        arguments.checkpoint,
        checkpoints.checkpoint,
        "list, verify or export what rota.Checkpoints saved",
        "rota checkpoint export run/step-100 -o model.safetensors",
    ),
}


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="rota", description=_DESCRIPTION, formatter_class=form)
    parser.add_argument("--version", action="store_true", help="print the version")
    subparsers = parser.add_subparsers(metavar="COMMAND", dest="command")
    for name, (add_arguments, function, summary, example) in _COMMANDS.items():
        description, epilog = f"{summary[0].upper()}{summary[1:]}.", f"example:\n  {example}"
        sub = subparsers.add_parser(name, help=summary, description=description, epilog=epilog, formatter_class=form)
        add_arguments(sub)
        sub.set_defaults(function=function)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 for a refused plan or a failed run, 2 for arguments or files that cannot be used."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no µ gets a ?, not a traceback
    with told_at_once():
        parser = _parser()
        given = parser.parse_args(argv)
    if given.version:
        import rota

        print(f"rota {rota.__version__}")
        return 0
    if given.command is None:
        parser.print_help()
        return 2
    try:
        files.refuse_output(given)
        return int(given.function(given))
    except RotaError as error:
        print(f"rota {given.command}: {_what(error)}: {_shown(error)}", file=sys.stderr)
        return 1 if isinstance(error, (PlanError, PipelineError)) else 2
    except KeyboardInterrupt:
        print(f"rota {given.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _shown(error: RotaError) -> str:
    """Its words, in which names of files may be anything."""
    return "\n".join(map(printable, str(error).split("\n")))


def _what(error: RotaError) -> str:
    return "refused" if isinstance(error, PlanError) else "error"
