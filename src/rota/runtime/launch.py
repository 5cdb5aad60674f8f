"""Starts a script on every rank of a plan, on this machine, with torchrun's machinery; ends all when one fails."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rota.checking import check
from rota.errors import PipelineError
from rota.plan import Plan
from rota.runtime.handover import collect, leave_plan
from rota.runtime.meshes import leave_mesh
from rota.timeline import Timeline


def launch(
    plan: Plan,
    script: str,
    arguments: Sequence[str] = (),
    threads_per_rank: int = 1,
    worker: str = "rota.runtime.worker",
    dp: int = 1,
    tp: int = 1,
) -> Timeline | None:
    """Run `script` with `arguments` in one process a rank; it gets the plan by `rota.given_plan()`.

    With `dp` replicas of `tp` parts each, there are dp · tp processes a rank, and `rota.mesh()` is that mesh.
    `worker` names the module that is started on each rank, and runs the script. Returns the timeline of the last
    step, of the first replica; None if no Pipeline ran one. Raises PlanError before anything starts, and
    PipelineError when a process fails; all others are ended then.
    """
    check(plan)
    if not Path(script).is_file():
        raise PipelineError(f"no script {script!r}; give the path of a Python file")
    with tempfile.TemporaryDirectory(prefix="rota-run-") as folder:
        environment = leave_plan(plan, folder) | leave_mesh(plan.num_ranks, dp, tp)
        environment["OMP_NUM_THREADS"] = str(threads_per_rank)
        before = dict(os.environ)
        os.environ.update(environment)  # inherited by the ranks
        try:
            _start(plan.num_ranks * dp * tp, worker, script, arguments, folder)
        finally:
            os.environ.clear()
            os.environ.update(before)
        return collect(plan, folder)


def _start(num_processes: int, worker: str, script: str, arguments: Sequence[str], folder: str) -> None:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=f"rota-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        monitor_interval=0.1,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=folder),  # else torchrun leaves a folder of its own behind
    )
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # our one line says it
    try:
        # -P: the working folder must not shadow what torch imports.
        elastic_launch(config, sys.executable)("-u", "-P", "-m", worker, script, *arguments)
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise PipelineError(f"ended by {error.sigval.name}, and all ranks with it") from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == -signal.SIGINT:
            raise KeyboardInterrupt from None
        ended = f"signal {-failure.exitcode}" if failure.exitcode < 0 else f"exit code {failure.exitcode}"
        raise PipelineError(
            f"rank {rank} ended with {ended} first, and the others were ended; see above for what it wrote"
        ) from None
