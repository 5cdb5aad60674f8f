"""`rota run`."""

from __future__ import annotations

import argparse
import signal
import sys

from rota import reading
from rota.cli import files
from rota.cli.arguments import add_force, add_timeout, mesh, number
from rota.cli.parser import Command, Parser
from rota.cli.requirements import InputError, require_installed
from rota.errors import PipelineError

_MOST_PROCESSES = 1024  # that `rota run` starts
_PIPELINE_S = 60.0  # after which a script that has made no pipeline is likely to make none


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rota run` to its parser."""
    parser.add_argument("plan", help="plan to run, such as plan.json")
    parser.add_argument("script", help="Python file to run on every rank; it calls rota.given_plan()")
    # Before Python 3.13, argparse reports the remaining words as required.
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments passed to the script").required = False
    parser.add_argument("--timeline", metavar="FILE", help="write the measured timeline of the last step")
    add_force(parser)
    parser.set_defaults(written={"timeline": "timeline"})
    help_text = (
        "numbers of pipeline ranks (pp), replicas (dp) and tensor-parallel shards (tp) (default: pp and dp as in the "
        "plan, tp=1)"
    )
    parser.add_argument("--mesh", type=mesh, default={}, metavar="pp=N,dp=N,tp=N", help=help_text)
    help_text = "restart all ranks if one fails, up to N times without a new checkpoint in between (default: 0)"
    parser.add_argument("--max-restarts", type=number(0), default=0, metavar="N", help=help_text)
    help_text = "with --max-restarts: where ranks keep their last states, a tmpfs (default: /dev/shm)"
    parser.add_argument("--snapshot-folder", metavar="DIR", help=help_text)
    add_timeout(parser)
    help_text = (
        "device of each rank: cpu, a type such as cuda, or auto (default), which uses accelerators if "
        "there is one per rank"
    )
    parser.add_argument("--device", default="auto", metavar="TYPE", help=help_text)
    help_text = (
        "before training, compare the split model with the unsplit one on the first batch, and stop unless "
        "the loss and gradients are exact"
    )
    parser.add_argument("--verify", action="store_const", const="batch", help=help_text)
    help_text = "like --verify, but run the unsplit model one micro-batch at a time, as BatchNorm requires"
    parser.add_argument(
        "--verify-microbatches", action="store_const", const="microbatches", dest="verify", help=help_text
    )
    parser.set_defaults(own_options=[option for option in parser.options if option != "--help"])


def run(arguments: argparse.Namespace) -> int:
    """Run the script on every rank of the plan. Returns the exit code: 128 + its number if a signal ended the run."""
    planned = files.read_plan(arguments.plan)
    require_installed("torch", "torch")
    from rota.runtime.environment import PROGRESS, device_environment
    from rota.runtime.launching.launch import EndedBySignal, launch

    reading.read_text(arguments.script)
    if arguments.snapshot_folder is not None and not arguments.max_restarts:
        raise InputError(f"--snapshot-folder {arguments.snapshot_folder} needs --max-restarts")
    replicas = 1 if planned.usage is None else planned.usage.num_replicas
    dp, tp = arguments.mesh.get("dp", replicas), arguments.mesh.get("tp", 1)
    if (pp := arguments.mesh.get("pp", planned.num_ranks)) != planned.num_ranks:
        raise InputError(f"--mesh pp={pp}: {arguments.plan} is for {planned.num_ranks} ranks; leave pp out")
    num_processes = planned.num_ranks * dp * tp
    if num_processes > _MOST_PROCESSES:
        raise InputError(f"--mesh: {num_processes:,} processes on this machine; give {_MOST_PROCESSES:,} at most")
    if arguments.device not in ("auto", "cpu"):
        from rota.runtime.device.local import device_type

        device_type(arguments.device, num_processes)  # refuses what is not there before anything is started
    for option in _misplaced(arguments):
        _report(
            f"{option} comes after the script, so it is passed to the script; to give it to `rota run`, put it before "
            f"the plan"
        )
    try:
        done = launch(
            planned,
            arguments.script,
            arguments.arguments,
            worker="rota.runtime.launching.worker" if arguments.verify is None else "rota.verifying.run_worker",
            environment=device_environment(arguments.device)
            | {PROGRESS: "1"}
            | ({} if arguments.verify is None else {"ROTA_VERIFY": arguments.verify}),
            dp=dp,
            tp=tp,
            max_restarts=arguments.max_restarts,
            timeout_s=arguments.timeout,
            pipeline_within_s=_PIPELINE_S,
            report=_report,
            forks=True,
            snapshot_folder=arguments.snapshot_folder,
        )
    except EndedBySignal as error:
        _report(str(error))
        return 128 + error.number
    if arguments.timeline is not None:
        if done.timeline is None:
            raise PipelineError(
                f"{arguments.script} ran no step of a Pipeline: there is no timeline to write to {arguments.timeline}"
            )
        command = f"rota compare {arguments.plan} {arguments.timeline}"
        then = f", the timeline of the last step; compare it with the plan: `{command}`"
        files.write(arguments.timeline, done.timeline.to_json(), then)
    return _report_end(done.ended_by)


def _misplaced(arguments: argparse.Namespace) -> list[str]:
    """The options of `rota run` among the script's arguments."""
    words = {word.partition("=")[0] for word in arguments.arguments}
    return [option for option in arguments.own_options if option in words]


def _report_end(ended_by: signal.Signals | None) -> int:
    """Report an early end. Returns the exit code: as in a shell for SIGTERM, 0 for SIGUSR1."""
    if ended_by is None:
        return 0
    _report(f"{ended_by.name}: all ranks have ended after the step that was running")
    return 128 + ended_by if ended_by == signal.SIGTERM else 0


def _report(line: str) -> None:
    print(f"rota run: {line}", file=sys.stderr, flush=True)


COMMAND = Command(
    "run",
    "train: start a script on every rank of a plan, on this machine",
    "rota run --timeline measured.json plan.json train.py --steps 100",
    add_arguments,
    run,
)
