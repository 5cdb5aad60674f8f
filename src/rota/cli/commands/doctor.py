"""`rota doctor`."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import TYPE_CHECKING

from rota.cli import files
from rota.cli.arguments import add_json, add_output, number, seconds
from rota.cli.parser import Command, Parser
from rota.cli.requirements import InputError
from rota.cli.screen import report_columns

if TYPE_CHECKING:
    from rota.diagnosis import Report, Wanted

_TIMEOUT_S = 30.0
_DETAILS = """

First, the command reports software versions, accelerators and their memory, the device of each rank, peer access, the
host's limits, and environment variables that slow down or break training. Then it starts one process per accelerator,
or CPU processes if there is none. It measures how fast each pair of processes exchanges messages, and how much the
clocks of the processes differ. Finally, it runs small plans and compares their gradients with those of the unsplit
model. All of this takes less than two minutes.

Each line begins with ok, skipped (with the reason), warning (Rota runs, but slowly or with a risk of failure) or
problem (with the fix).

To examine several nodes, start the command with torchrun: torchrun … -m rota doctor

exit code: 0 no problems, 1 at least one problem, 2 invalid arguments"""


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rota doctor` to its parser."""
    add_json(parser)
    add_output(parser, "FILE", "write all findings and measurements as JSON")
    help_text = "number of processes to test with (default: one per accelerator; on the CPU, up to 4)"
    parser.add_argument("--ranks", type=number(1), metavar="N", help=help_text)
    parser.add_argument("--no-self-test", action="store_true", help="measure links and clocks, but run no plans")
    help_text = (
        "run every schedule with every number of ranks from 2 to --ranks, and measure messages of 1 kB to 64 MB (takes "
        "minutes)"
    )
    parser.add_argument("--full", action="store_true", help=help_text)
    help_text = f"stop a rank after S seconds without progress (default: {_TIMEOUT_S:g})"
    parser.add_argument("--timeout", type=seconds, default=_TIMEOUT_S, metavar="S", help=help_text)


def run(arguments: Namespace) -> int:
    """Examine this machine, and report. Returns the exit code."""
    from rota.diagnosis import Wanted

    if arguments.no_self_test and arguments.full:
        raise InputError("--full and --no-self-test: --full is a longer self-test; leave one out")
    wanted = Wanted(arguments.ranks, not arguments.no_self_test, arguments.full, arguments.timeout)
    report = _examined(wanted)
    if report is None:  # the first rank prints it
        return 0
    if arguments.json:
        print(report.to_json(), end="")
    else:
        print(report.to_text(report_columns()))
    if arguments.output is not None:
        files.write(arguments.output, report.to_json(), quietly=arguments.json)
    return report.exit_code


def _examined(wanted: Wanted) -> Report | None:
    from rota.diagnosis import examine, examine_launched

    if "RANK" not in os.environ:
        return examine(wanted)
    if wanted.num_ranks is not None:
        raise InputError("--ranks: the launcher has already started the processes; leave --ranks out")
    return examine_launched(wanted)


COMMAND = Command(
    "doctor",
    "check this machine's software versions, devices and links, and run a self-test of training",
    "rota doctor\n  rota doctor -o doctor.json",
    add_arguments,
    run,
    _DETAILS,
)
