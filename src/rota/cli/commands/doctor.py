"""`rota doctor`."""

from __future__ import annotations

import os
from argparse import Namespace

from rota.cli import files
from rota.cli.arguments import add_json, add_output, number
from rota.cli.parser import Command, Parser
from rota.cli.requirements import InputError
from rota.cli.screen import report_columns

_DETAILS = """

The command prints the versions of Python, Rota, PyTorch and its libraries. Then it starts one process per accelerator,
or CPU processes if there is none. These print their devices, measure latency and rate between each pair of them, and
train a small model, which must give the same losses and weights as without Rota.

Each line begins with ok, skipped (with the reason) or problem (with the fix).

To examine several nodes, start the command with torchrun: torchrun … -m rota doctor

exit code: 0 no problems, 1 at least one problem, 2 invalid arguments"""


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rota doctor` to its parser."""
    add_json(parser)
    add_output(parser, "FILE", "write all findings and measurements as JSON")
    help_text = "number of processes to test with (default: one per accelerator; on the CPU, up to 4)"
    parser.add_argument("--ranks", type=number(1), metavar="N", help=help_text)


def run(arguments: Namespace) -> int:
    """Examine this machine, and report. Returns the exit code."""
    from rota.diagnosis import examine, examine_launched

    if "RANK" not in os.environ:
        report = examine(arguments.ranks)
    elif arguments.ranks is not None:
        raise InputError("--ranks: the launcher has already started the processes; leave --ranks out")
    elif (launched := examine_launched()) is None:  # the first rank prints it
        return 0
    else:
        report = launched
    if arguments.json:
        print(report.to_json(), end="")
    else:
        print(report.to_text(report_columns()))
    if arguments.output is not None:
        files.write(arguments.output, report.to_json(), quietly=arguments.json)
    return report.exit_code


COMMAND = Command(
    "doctor",
    "print versions, devices and the speed of links, and run a self-test of training",
    "rota doctor\n  rota doctor -o doctor.json",
    add_arguments,
    run,
    _DETAILS,
)
