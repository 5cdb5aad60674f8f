"""Starts a script on every rank of a plan, on this machine.

When a rank fails all are ended, and started again as often as is allowed; requests to end are passed on to them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, final

from rota.checking import check
from rota.errors import PipelineError
from rota.plan import Plan
from rota.runtime.faults.stragglers import Straggler, stragglers
from rota.runtime.launcher_files import collect, leave_limit, leave_plan, leave_restart
from rota.runtime.launching.folder import Folder, run_folder
from rota.runtime.launching.ranks import EndedBySignal, RankFailed, Ranks
from rota.runtime.launching.requests import Requests
from rota.runtime.meshes import leave_mesh
from rota.runtime.process_group import leave_meeting
from rota.runtime.recorder import merge
from rota.timeline import Timeline
from rota.units import count_text

__all__ = ["EndedBySignal", "Run", "launch", "start"]


class Run(NamedTuple):
    """How a run went: the last step's timeline (None if no Pipeline ran one) and who was slow, of the first replica.

    `ended_by`: the signal to this process that asked the ranks to end, if one did.
    """

    timeline: Timeline | None
    stragglers: list[Straggler]
    ended_by: signal.Signals | None


def launch(
    plan: Plan,
    script: str,
    arguments: Sequence[str] = (),
    threads_per_rank: int = 1,
    worker: str = "rota.runtime.launching.worker",
    dp: int = 1,
    tp: int = 1,
    max_restarts: int = 0,
    timeout_s: float | None = None,
    environment: Mapping[str, str] | None = None,
    report: Callable[[str], None] = print,
) -> Run:
    """Run `script` with `arguments` in one process per rank; it gets the plan by `rota.given_plan()`.

    When a process fails, all others are killed, and all are started again. SIGTERM and SIGUSR1 end the ranks after the
    step that is running, if the script looks at `pipeline.should_stop`. If it does not, or when one of them comes
    again, they end the ranks at once.

    Args:
        plan: what the ranks run.
        script: the path of a Python file.
        arguments: its `sys.argv[1:]`.
        threads_per_rank: that PyTorch may use for one op.
        worker: the module that is started on each rank, and runs the script.
        dp: replicas of the pipeline. There are dp · tp processes per rank, and `rota.mesh()` is that mesh.
        tp: shards of each replica.
        max_restarts: how often the ranks are started again without a newer checkpoint in between.
        timeout_s: how long a rank may make no progress, where the script gives no `timeout_s` of its own.
        environment: of the ranks, besides this process's own and what the launcher adds.
        report: gets one line for each restart.

    Raises:
        PlanError: `check` refuses the plan. Nothing has been started.
        PipelineError: a process failed, or the script ended without a Pipeline.
        EndedBySignal: a signal to this process has ended the ranks.
    """
    check(plan)
    if not Path(script).is_file():
        raise PipelineError(f"no script {script!r}; give the path of a Python file")
    command = ("-u", "-P", "-m", worker, script, *arguments)  # -P: the folder must not shadow what torch imports
    with run_folder("rota-run-") as folder:
        of_ranks = {
            **(environment or {}),
            **leave_plan(plan, folder.path),
            **leave_mesh(plan.num_ranks, dp, tp),
            **leave_limit(timeout_s),
            "OMP_NUM_THREADS": str(threads_per_rank),
        }
        restarts = _Restarts(max_restarts, report)
        with Requests() as requests:
            while True:
                with Ranks(folder, requests) as ranks:
                    of_start = of_ranks | leave_restart(restarts.num_all)
                    try:
                        start(ranks, plan.num_ranks * dp * tp, command, folder, of_start)
                        ranks.wait()
                        break
                    except RankFailed as error:
                        restarts.count(error, ranks.saved_step, may_restart=requests.asked is None)
        if not ranks.has_pipeline:
            raise PipelineError(
                f"{script} ended without making a rota.Pipeline on any rank, so the plan was not run; let it make one "
                f"and call its step, or start it by `python {script}`"
            )
        records = collect(plan, folder.path, restarts.num_all)
    return Run(merge(plan, records) if records else None, stragglers(plan, records), requests.asked)


def start(
    ranks: Ranks, num_processes: int, command: Sequence[str], folder: Folder, environment: dict[str, str]
) -> None:
    """Start `num_processes` that meet in the folder, and there alone, with `environment` besides this process's own."""
    # If this process runs under torchrun, its ranks do not.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    meeting = leave_meeting(folder.path, num_processes)
    ranks.start(command, [inherited | environment | of_rank for of_rank in meeting])


@final
class _Restarts:
    """How often all ranks were started again: `num_all`, and of these how many without a newer checkpoint between."""

    def __init__(self, most: int, report: Callable[[str], None]) -> None:
        self.num_all = 0
        self._most, self._report = most, report
        self._in_a_row, self._newest_step = 0, -1

    def count(self, error: RankFailed, saved_step: int, may_restart: bool) -> None:
        """One more. Raises PipelineError where there may be none."""
        if saved_step > self._newest_step:
            # Only what is newer than all before: a run that repeats the same steps comes to an end.
            self._newest_step, self._in_a_row = saved_step, 0
        if not may_restart or self._in_a_row >= self._most:
            raise PipelineError(error.to_text(self._so_far())) from None
        self.num_all += 1
        self._in_a_row += 1
        self._report(f"{error}: restart {self._in_a_row} of {self._most}")

    def _so_far(self) -> str:
        if not self.num_all:
            return ""
        without = f" without a newer checkpoint, {self.num_all} in all" if self.num_all > self._in_a_row else ""
        return f" after {count_text(self._in_a_row, 'restart')}{without}"
