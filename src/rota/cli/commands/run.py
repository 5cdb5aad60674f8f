"""`rota run`."""

from __future__ import annotations

import signal
from functools import partial

import click

from rota.cli import common, files
from rota.cli.command import Options, Output, Value, command
from rota.cli.common import parse_mesh
from rota.cli.requirements import InputError, require_installed
from rota.cli.screen import note
from rota.core import reading
from rota.core.errors import PipelineError

_MOST_PROCESSES = 1024  # that `rota run` starts


@command("rota run --timeline measured.json plan.json train.py --steps 100", interspersed=False)
@common.argument("plan", help="plan to run, such as plan.json")
@common.argument("script", help="Python file to run on every rank; it calls rota.given_plan()")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, help="arguments passed to the script")
@common.file("--timeline", cls=Output, writes="timeline", help="write the measured timeline of the last step")
@common.force
@click.option(
    "--mesh",
    type=Value("mesh", parse_mesh),
    metavar="pp=N,dp=N,tp=N",
    help="numbers of pipeline ranks (pp), replicas (dp) and tensor-parallel shards (tp) (default: pp and dp as in the "
    "plan, tp=1)",
)
@common.natural(
    "--max-restarts",
    default=0,
    help="restart all ranks if one fails, up to N times without a new checkpoint in between (default: 0)",
)
@common.file(
    "--snapshot-folder",
    metavar="DIR",
    help="with --max-restarts: where ranks keep their last states, a tmpfs (default: /dev/shm)",
)
@common.timeout
@click.option(
    "--device",
    default="auto",
    metavar="TYPE",
    help="device of each rank: cpu, a type such as cuda, or auto (default), which uses accelerators if there is one "
    "per rank",
)
@click.option(
    "--verify",
    flag_value="batch",
    help="before training, compare the split model with the unsplit one on the first batch, and stop unless the loss "
    "and gradients are exact",
)
@click.option(
    "--verify-microbatches",
    "verify",
    flag_value="microbatches",
    help="like --verify, but run the unsplit model one micro-batch at a time, as BatchNorm requires",
)
def run(options: Options) -> int:
    """Train: start a script on every rank of a plan, on this machine."""
    for word in (options.plan, options.script):
        if word.startswith("-"):
            raise InputError(f"{word} comes after the plan; put the options of `rota run` before the plan")
    planned = files.read_plan(options.plan)
    require_installed("torch", "torch")
    from rota.runtime.environment import DEVICE, PROGRESS
    from rota.runtime.launching.launch import EndedBySignal, Launch, launch

    reading.read_text(options.script)
    if options.snapshot_folder is not None and not options.max_restarts:
        raise InputError(f"--snapshot-folder {options.snapshot_folder} needs --max-restarts")
    mesh = options.mesh or {}
    dp, tp = mesh.get("dp", planned.num_replicas), mesh.get("tp", 1)
    if (pp := mesh.get("pp", planned.num_ranks)) != planned.num_ranks:
        raise InputError(f"--mesh pp={pp}: {options.plan} is for {planned.num_ranks} ranks; leave pp out")
    num_processes = planned.num_ranks * dp * tp
    if num_processes > _MOST_PROCESSES:
        raise InputError(f"--mesh: {num_processes:,} processes on this machine; give {_MOST_PROCESSES:,} at most")
    if options.device not in ("auto", "cpu"):
        from rota.runtime.device.local import device_type

        device_type(options.device, num_processes)  # refuses what is not there before anything is started
    words = {word.partition("=")[0] for word in options.arguments}
    for option in (name for param in run.params for name in param.opts if name.startswith("--") and name in words):
        note(
            "run",
            f"{option} comes after the script, so it is passed to the script; to give it to `rota run`, put it before "
            f"the plan",
        )
    try:
        how = Launch(
            dp=dp,
            tp=tp,
            max_restarts=options.max_restarts,
            snapshot_folder=options.snapshot_folder,
            timeout_s=options.timeout,
            environment={DEVICE: options.device, PROGRESS: "1", "ROTA_VERIFY": options.verify or ""},
            worker="rota.runtime.launching.worker" if options.verify is None else "rota.verifying.run_worker",
            forks=True,
        )
        outcome = launch(planned, options.script, [*options.arguments], how, partial(note, "run"))
    except EndedBySignal as error:
        note("run", str(error))
        return 128 + error.number
    if options.timeline is not None:
        if outcome.timeline is None:
            raise PipelineError(
                f"{options.script} ran no step of a Pipeline: there is no timeline to write to {options.timeline}"
            )
        command = f"rota compare {options.plan} {options.timeline}"
        then = f", the timeline of the last step; compare it with the plan: `{command}`"
        files.write(options.timeline, outcome.timeline.to_json(), then)
    return _report_end(outcome.ended_by)


def _report_end(ended_by: signal.Signals | None) -> int:
    """Report an early end. Returns the exit code: as in a shell for SIGTERM, 0 for SIGUSR1."""
    if ended_by is None:
        return 0
    note("run", f"{ended_by.name}: all ranks have ended after the step that was running")
    return 128 + ended_by if ended_by == signal.SIGTERM else 0
