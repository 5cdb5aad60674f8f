"""`rota rehearse`."""

from __future__ import annotations

from argparse import Namespace

from rota.cli import files, json_reports
from rota.cli.arguments import add_json, add_output, add_timeout, number
from rota.cli.json_reports import print_json
from rota.cli.parser import Command, Parser
from rota.cli.requirements import InputError, require
from rota.cli.screen import print_replicas, print_text, print_wire_effects, progress_line, report_columns


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rota rehearse` to its parser."""
    help_text = "plan.json; if there are several, each runs for one step, one after another, and --steps has no effect"
    parser.add_argument("plans", nargs="+", metavar="plan", help=help_text)
    help_text = "number of steps to measure, after one to four warm-up steps (default: 5)"
    parser.add_argument("--steps", type=number(1), metavar="N", default=5, help=help_text)
    parser.add_argument("--allocate", action="store_true", help="also allocate the memory that the plan needs")
    add_timeout(parser)
    help_text = (
        "cpu, cuda or another device on this machine, or auto (default), which uses accelerators if there "
        "is one per rank"
    )
    parser.add_argument("--device", default="auto", metavar="NAME", help=help_text)
    add_json(parser)
    add_output(parser, "FILE", "write the median step's timeline as JSON")


def run(arguments: Namespace) -> int:
    """Rehearse the plan, print the report, and write the median step's timeline. Returns the exit code."""
    require("torch", "torch")
    from rota.planning import rehearsal

    if len(arguments.plans) > 1:
        return _batches(arguments)
    planned = files.read_plan(arguments.plans[0])
    assumed = files.note_assumed_times("rehearse", arguments.plans[0])
    with progress_line() as show:
        rehearsed = rehearsal.rehearse(
            planned,
            num_steps=arguments.steps,
            allocate=arguments.allocate,
            timeout_s=arguments.timeout,
            device=arguments.device,
            progress=show,
        )
    if arguments.json:
        print_json({"times_assumed": assumed, **json_reports.of_rehearsal(rehearsed)})
    else:
        print(rehearsed.to_text(report_columns()))
        print_wire_effects(rehearsed.planned.plan, report_columns())
        print_replicas(planned, "rehearsed")
    if arguments.output is not None:
        then = f"; see it with `rota show {arguments.output}`"
        files.write(arguments.output, rehearsed.measured.to_json(), then, quietly=arguments.json)
    return 0


def _batches(arguments: Namespace) -> int:
    from rota.planning import rehearsal

    if arguments.allocate or arguments.output or arguments.device not in ("auto", "cpu"):
        raise InputError(
            "several plans are rehearsed on the CPU, without --allocate or -o; give a single plan to use these options"
        )
    plans = [files.read_plan(path) for path in arguments.plans]
    with progress_line() as show:
        found = rehearsal.rehearse_batches(plans, timeout_s=arguments.timeout, progress=show)
    if arguments.json:
        print_json(json_reports.of_batches(found))
    else:
        print_text(found.to_text())
    return 0


COMMAND = Command(
    "rehearse",
    "run a plan with real processes and messages, but with timed waits instead of computation",
    "rota rehearse plan.json --steps 5 -o rehearsed.json",
    add_arguments,
    run,
)
