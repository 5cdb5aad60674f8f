"""`rota doctor`."""

from __future__ import annotations

import os

from rota.cli import common, files
from rota.cli.command import Options, command
from rota.cli.requirements import InputError
from rota.cli.screen import report_columns


@command("rota doctor\nrota doctor -o doctor.json")
@common.json
@common.output("FILE", "write all findings and measurements as JSON")
@common.count("--ranks", help="number of processes to test with (default: one per accelerator; on the CPU, up to 4)")
def doctor(options: Options) -> int:
    """Print versions, devices and the speed of links, and run a self-test of training.

    The command prints the versions of Python, Rota, PyTorch and its libraries. Then it starts one process per
    accelerator, or CPU processes if there is none. These print their devices, measure latency and rate between each
    pair of them, and train a small model, which must give the same losses and weights as without Rota.

    Each line begins with ok, skipped (with the reason) or problem (with the fix).

    To examine several nodes, start the command with torchrun: torchrun … -m rota doctor

    Exit code: 0 no problems, 1 at least one problem, 2 invalid arguments
    """
    from rota.diagnosis import examine, examine_launched

    if "RANK" not in os.environ:
        report = examine(options.ranks)
    elif options.ranks is not None:
        raise InputError("--ranks: the launcher has already started the processes; leave --ranks out")
    elif (launched := examine_launched()) is None:  # the first rank prints it
        return 0
    else:
        report = launched
    if options.json:
        print(report.to_json(), end="")
    else:
        print(report.to_text(report_columns()))
    if options.output is not None:
        files.write(options.output, report.to_json(), quietly=options.json)
    return report.exit_code
