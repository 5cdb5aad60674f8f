"""Starts a script on every rank of a plan, on this machine.

When a rank fails, all are ended, and started again as often as is allowed. Requests to end are passed on to the ranks.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, final

from rota.core.errors import PipelineError
from rota.core.plan import Plan
from rota.core.simulation import check
from rota.core.text import count_text
from rota.core.timeline import Timeline
from rota.runtime.environment import KEPT_MEMORY, MESH, RESTART, TIMEOUT_S, meeting_environments
from rota.runtime.launcher_files import State, collect, keep_script, report_changed_script, states_in, write_plan
from rota.runtime.launching.forking import fork, import_for_ranks
from rota.runtime.launching.rank_processes import RankFailed, Ranks, Starter, in_new_interpreter
from rota.runtime.launching.requests import EndedBySignal, Requests
from rota.runtime.launching.run_folder import run_folder
from rota.runtime.recorder import merge

__all__ = ["EndedBySignal", "Launch", "Run", "launch"]


class Run(NamedTuple):
    """The first replica's timeline of the last step; None if no Pipeline ran a step.

    `ended_by`: the signal to this process that asked the ranks to end, if any.
    """

    timeline: Timeline | None
    ended_by: signal.Signals | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How `launch` runs a script.

    Attributes:
        dp: replicas of the pipeline. There are dp · tp processes per rank, and `rota.mesh()` returns that mesh.
        tp: TP shards of each replica.
        max_restarts: how often the ranks are started again without a newer checkpoint in between.
        snapshot_folder: with `max_restarts`, where the run's folder is, with the ranks' last states: a file system in
            memory; None: /dev/shm.
        timeout_s: how long a rank may make no progress, in seconds, if the script gives no `timeout_s` of its own.
        environment: variables of the ranks, besides this process's own and those that the launcher adds.
        worker: the module that each process runs; it runs the script.
        forks: import PyTorch here, once, and fork the ranks from this process, which must do nothing else.
    """

    dp: int = 1
    tp: int = 1
    max_restarts: int = 0
    snapshot_folder: str | None = None
    timeout_s: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    worker: str = "rota.runtime.launching.worker"
    forks: bool = False


def launch(
    plan: Plan,
    script: str,
    arguments: Sequence[str] = (),
    options: Launch | None = None,
    report: Callable[[str], None] = print,
) -> Run:
    """Run `script` with `arguments` in one process per rank; `rota.given_plan()` returns the plan there.

    When a process fails, all others are killed, and all are started again. SIGTERM and SIGUSR1 end the ranks after the
    step that is running, if the script reads `pipeline.should_stop`. If it does not, or at a second signal, they end
    the ranks at once.

    Args:
        plan: what the ranks run.
        script: the path of a Python file.
        arguments: its `sys.argv[1:]`.
        options: how; None: one process per rank, and no restarts.
        report: called with one line for each restart.

    Returns:
        The last step's timeline, and the signal that asked the ranks to end.

    Raises:
        PlanError: `check` refuses the plan. Nothing has been started.
        PipelineError: a process failed, or the script ended without a Pipeline.
        EndedBySignal: a signal to this process has ended the ranks.
    """
    how = options or Launch()
    check(plan)
    if not Path(script).is_file():
        raise PipelineError(f"no script {script!r}; give the path of a Python file")
    num_processes = plan.num_ranks * how.dp * how.tp
    of_all = _inherited() | {**how.environment, MESH: f"{how.dp} {plan.num_ranks} {how.tp}"}
    if how.timeout_s is not None:
        of_all[TIMEOUT_S] = repr(how.timeout_s)
    if how.forks:
        import_for_ranks(of_all)
    with ExitStack() as stack:
        where = (how.snapshot_folder or "/dev/shm") if how.max_restarts else None
        folder = stack.enter_context(run_folder("rota-run-", where))
        memories = [Path(folder.path, f"snapshots-{rank}") for rank in range(num_processes if how.max_restarts else 0)]
        for memory in memories:
            memory.mkdir()
        keep_script(script, folder.path)
        restarts = _Restarts(how.max_restarts, report)
        requests = stack.enter_context(Requests())
        starter: Starter = partial(in_new_interpreter, ("-P", "-m", how.worker, script, *arguments))
        if how.forks:
            starter = partial(fork, requests, how.worker, (script, *arguments))
        of_all |= write_plan(plan, folder.path)
        while True:
            ranks = Ranks(folder, requests)
            try:
                with ranks:
                    if restarts.num_all:
                        report_changed_script(script, folder.path, report)
                    of_start = of_all | {RESTART: str(restarts.num_all)}
                    environments = [of_start | of_rank for of_rank in meeting_environments(folder.path, num_processes)]
                    for of_rank, kept in zip(environments, memories, strict=False):
                        of_rank[KEPT_MEMORY] = str(kept)
                    ranks.start(starter, environments)
                    ranks.wait()
            except RankFailed as error:
                in_memory = set.intersection(*map(states_in, memories)) if memories else set()
                restarts.count(error, ranks.saved | in_memory, may_restart=requests.asked is None)
            else:
                break
        if not ranks.has_pipeline:
            raise PipelineError(
                f"{script} ended without making a rota.Pipeline on any rank, so the plan was not run; let it make one "
                f"and call its step, or start it by `python {script}`"
            )
        records = collect(plan, folder.path, restarts.num_all)
    return Run(merge(plan, records) if records else None, requests.asked)


def _inherited() -> dict[str, str]:
    """This process's variables. If it runs under torchrun, its ranks do not."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")},
        "OMP_NUM_THREADS": "1",
        # Otherwise OpenBLAS may start threads when the supervisor imports NumPy, and a fork loses them.
        "OPENBLAS_NUM_THREADS": "1",
        # Otherwise the order of a set of strings depends on the interpreter, where each rank has its own.
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
    }


@final
class _Restarts:
    """Counts restarts: all of them (`num_all`), and those since the newest checkpoint."""

    def __init__(self, most: int, report: Callable[[str], None]) -> None:
        self.num_all = 0
        self._most, self._report = most, report
        self._in_a_row, self._newest = 0, dict[str, int]()

    def count(self, error: RankFailed, states: Set[State], may_restart: bool) -> None:
        """Count one restart. Raises PipelineError if no more are allowed. `states`: those that are saved or in memory.

        Older checkpoints do not count: otherwise a run could repeat the same steps without end.
        """
        newer = sorted(state for state in states if state.step > self._newest.get(state.training, -1))
        self._newest |= dict(newer)
        if newer:
            self._in_a_row = 0
        if not may_restart or self._in_a_row >= self._most:
            in_all = f" without a newer checkpoint, {self.num_all} in all" if self.num_all > self._in_a_row else ""
            after = f" after {count_text(self._in_a_row, 'restart')}{in_all}" if self.num_all else ""
            raise PipelineError(error.to_text(after)) from None
        self.num_all += 1
        self._in_a_row += 1
        self._report(f"{error}: restart {self._in_a_row} of {self._most}")
