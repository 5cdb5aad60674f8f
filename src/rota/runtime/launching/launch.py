"""Starts a script on every rank of a plan, on this machine.

When a rank fails, all are ended, and started again as often as is allowed. Requests to end are passed on to the ranks.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, final

from rota.backups import Backups
from rota.checking import check
from rota.errors import PipelineError, PlacementError, PlanError
from rota.plan import Plan
from rota.runtime.environment import backups_environment, meeting_environments
from rota.runtime.freed_memory import HUGE_PAGES
from rota.runtime.kept_memory import MOST_FORMER, KeptMemories, State
from rota.runtime.launcher_files import (
    collect,
    keep_script,
    last_plan,
    limit_environment,
    report_changed_script,
    restart_environment,
    write_plan,
)
from rota.runtime.launching.crew import Crew
from rota.runtime.launching.follower import Follower, follow
from rota.runtime.launching.leader import Leader
from rota.runtime.launching.newest_states import NewestStates
from rota.runtime.launching.node_crew import NodeCrew
from rota.runtime.launching.nodes import NodeLost, Nodes, job_of
from rota.runtime.launching.rank_processes import RankFailed, Ranks
from rota.runtime.launching.requests import EndedBySignal, Requests
from rota.runtime.launching.run_folder import Folder, run_folder
from rota.runtime.launching.stand_by import StandBy
from rota.runtime.recorder import merge
from rota.timeline import Timeline
from rota.units import count_text

__all__ = ["EndedBySignal", "Run", "launch", "start"]


class Run(NamedTuple):
    """The first replica's timeline of the last step; None if no Pipeline ran a step.

    `ended_by`: the signal to this process that asked the ranks to end, if any.
    """

    timeline: Timeline | None
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
    backups: Backups | None = None,
    rejoin_after_s: float | None = 60.0,
    min_ranks: int | None = None,
    timeout_s: float | None = None,
    environment: Mapping[str, str] | None = None,
    nodes: Nodes | None = None,
    pipeline_within_s: float | None = None,
    report: Callable[[str], None] = print,
) -> Run:
    """Run `script` with `arguments` in one process per rank; `rota.given_plan()` returns the plan there.

    When a process fails, all others are killed, and all are started again; with `backups`, one that fails too often is
    left out, its peers do its work, and after a while it is started again; with `min_ranks`, the others run its stages,
    too. SIGTERM and SIGUSR1 end the ranks after the step that is running, if the script reads `pipeline.should_stop`.
    If it does not, or at a second signal, they end the ranks at once.

    Args:
        plan: what the ranks run.
        script: the path of a Python file.
        arguments: its `sys.argv[1:]`.
        threads_per_rank: how many threads PyTorch may use for one op.
        worker: the module that each process runs; it runs the script.
        dp: replicas of the pipeline. There are dp · tp processes per rank, and `rota.mesh()` returns that mesh.
        tp: TP shards of each replica.
        max_restarts: how often the ranks are started again without a newer checkpoint in between.
        backups: plans for the loss of each rank of `plan` in one of `dp` replicas.
        rejoin_after_s: for how many seconds the others go on before a lost rank is started again; None: for ever.
        min_ranks: how few ranks of `plan` may go on without the others; None: all are needed. Not with replicas.
        timeout_s: how long a rank may make no progress, in seconds, if the script gives no `timeout_s` of its own.
        environment: variables of the ranks, besides this process's own and those that the launcher adds.
        nodes: which of several machines this is; all run the same, and each starts its part of the ranks.
        pipeline_within_s: report once that no rank has made a pipeline by then, in seconds; None: do not.
        report: called with one line for each restart, loss and replacement, and for a pipeline that is missing.

    Returns:
        The last step's timeline, and the signal that asked the ranks to end.

    Raises:
        PlanError: `check` refuses the plan. Nothing has been started.
        PipelineError: a process failed, or the script ended without a Pipeline.
        EndedBySignal: a signal to this process has ended the ranks.
    """
    _require_launchable(plan, script, dp * tp, min_ranks, nodes)
    num_processes = plan.num_ranks * dp * tp
    num_here = num_processes if nodes is None else nodes.num_here(num_processes)
    with ExitStack() as stack:
        folder = stack.enter_context(run_folder("rota-run-"))
        of_ranks = _environment_of_all(environment, timeout_s, backups, threads_per_rank)
        script_text = keep_script(script, folder.path)
        restarts = _Restarts(max_restarts, report)
        requests = stack.enter_context(Requests())
        may_restart = max_restarts > 0 or backups is not None or min_ranks is not None
        memories = stack.enter_context(KeptMemories(num_here if may_restart else 0))
        stand_by = stack.enter_context(StandBy(_inherited() | of_ranks, may_restart, requests, report))
        crew: Crew | NodeCrew
        leader, sizes, command = None, (plan.num_ranks, dp, tp), (worker, script, *arguments)
        if nodes is None:
            crew = Crew(plan, dp, tp, memories, backups, rejoin_after_s, min_ranks)
        else:
            options = worker, sizes, max_restarts, backups and backups.to_json(), rejoin_after_s, timeout_s, environment
            job, may_lose = job_of(plan, script_text, arguments, options), backups is not None
            if nodes.node:
                follower = stack.enter_context(Follower(nodes, job, requests, memories, report, may_lose))
                variables = _inherited() | of_ranks
                ended_by = follow(follower, nodes, plan, sizes, command, variables, folder, requests, stand_by)
                return Run(None, ended_by)
            leader = stack.enter_context(Leader(nodes, num_processes, job, requests, folder.path, report, may_lose))
            crew = NodeCrew(plan, sizes, memories, nodes, leader, backups, rejoin_after_s)
        is_over = False
        while not is_over:
            ranks = Ranks(folder, requests, leader, crew.prepare(restarts.num_all))
            failed: RankFailed | NodeLost | None = None
            try:
                with ranks:
                    crew.begin()
                    if restarts.num_all:
                        report_changed_script(script, folder.path, report)
                    files = crew.files_of_start()  # before the environments: former memories may not be needed any more
                    environments = _environments(crew, folder, of_ranks, restarts.num_all)
                    ranks.fork(stand_by, command, environments, files)
                    if pipeline_within_s is not None and not restarts.num_all:
                        text = _no_pipeline(script, num_processes, pipeline_within_s)
                        is_over = _wait_for_pipeline(ranks, pipeline_within_s, text, report)
                    is_over = is_over or ranks.wait(lambda: crew.rejoin_at_s)
            except (RankFailed, NodeLost) as error:
                failed = error
            if isinstance(failed, RankFailed) and leader is not None:
                failed = leader.taken_loss() or failed  # a rank may fail because a node is lost
            states = {*ranks.saved, *crew.states()}
            if isinstance(failed, RankFailed):
                restarts.count(failed, states, crew, may_restart=requests.asked is None)
            elif isinstance(failed, NodeLost):
                restarts.count_lost_node(failed, states, crew, may_restart=requests.asked is None)
            elif not is_over:
                restarts.count_rejoining(crew)
        if not ranks.has_pipeline:
            raise PipelineError(
                f"{script} ended without making a rota.Pipeline on any rank, so the plan was not run; let it make one "
                f"and call its step, or start it by `python {script}`"
            )
        records = collect(crew.plan, folder.path, restarts.num_all)
        ran = last_plan(crew.plan, folder.path, restarts.num_all)
    return Run(merge(ran, records) if records else None, requests.asked)


def _require_launchable(
    plan: Plan, script: str, num_pipelines: int, min_ranks: int | None, nodes: Nodes | None
) -> None:
    """Raises PlanError if `check` refuses the plan, PipelineError if it cannot be run like this."""
    check(plan)
    if not Path(script).is_file():
        raise PipelineError(f"no script {script!r}; give the path of a Python file")
    if min_ranks is None:
        return
    if num_pipelines > 1 or plan.num_ranks > MOST_FORMER:
        raise PipelineError(
            f"min_ranks is for one pipeline of at most {MOST_FORMER} ranks, not for {num_pipelines} of "
            f"{plan.num_ranks} ranks each; leave it out"
        )
    if nodes is not None:
        raise PipelineError(
            f"min_ranks={min_ranks} is for ranks on one machine, whose memories outlive each of them; leave it out, or "
            f"leave out nodes"
        )


def _environment_of_all(
    given: Mapping[str, str] | None, timeout_s: float | None, backups: Backups | None, threads_per_rank: int
) -> dict[str, str]:
    """The variables of every rank of every start, besides this process's own."""
    return {
        **(given or {}),
        **limit_environment(timeout_s),
        **(backups_environment() if backups is not None else {}),
        "OMP_NUM_THREADS": str(threads_per_rank),
        # Otherwise OpenBLAS may start threads when the stand-by imports NumPy, and a fork loses them.
        "OPENBLAS_NUM_THREADS": "1",
        # The same for all stand-bys of all nodes: otherwise the order of a set of strings depends on the stand-by.
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
    }


def _wait_for_pipeline(ranks: Ranks, within_s: float, missing: str, report: Callable[[str], None]) -> bool:
    """Whether all ranks have ended after this time; if not, and no rank has made a pipeline, reports `missing`."""
    until_s = time.monotonic() + within_s
    is_over = ranks.wait(lambda: until_s)
    if not is_over and not ranks.has_pipeline:
        report(missing)
    return is_over


def _no_pipeline(script: str, num_processes: int, within_s: float) -> str:
    return (
        f"no rank has made a rota.Pipeline after {within_s:g} s: if {script} makes none, each of the {num_processes} "
        f"processes runs the whole script by itself, and the plan is not used; stop this run then, and let the script "
        f"make a rota.Pipeline, or start it by `python {script}`"
    )


def start(
    ranks: Ranks, num_processes: int, command: Sequence[str], folder: Folder, environment: dict[str, str]
) -> None:
    """Start `num_processes` processes that meet only in the folder; `environment` is added to this process's own."""
    environments = meeting_environments(folder.path, num_processes)
    ranks.start(command, [_inherited() | environment | of_rank for of_rank in environments])


def _environments(crew: Crew | NodeCrew, folder: Folder, of_ranks: dict[str, str], start: int) -> list[dict[str, str]]:
    """The variables of each rank of this machine for the start with this number."""
    plans = write_plan(crew.plan, folder.path, crew.former_plan)
    of_start = _inherited() | of_ranks | plans | restart_environment(start)
    return [of_start | of_rank for of_rank in crew.environments(folder.path)]


def _inherited() -> dict[str, str]:
    """This process's variables. If it runs under torchrun, its ranks do not."""
    return HUGE_PAGES | {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}


@final
class _Restarts:
    """Counts restarts: all of them (`num_all`), and those since the newest checkpoint."""

    def __init__(self, most: int, report: Callable[[str], None]) -> None:
        self.num_all = 0
        self._most, self._report = most, report
        self._in_a_row, self._newest = 0, NewestStates()

    def count(self, error: RankFailed, states: Set[State], crew: Crew | NodeCrew, may_restart: bool) -> None:
        """Count one restart, of all or of those that can go on. Raises PipelineError if no more are allowed.

        `states`: those that are saved or in memory.
        """
        if self._newest.note(states):
            # Older checkpoints do not count: otherwise a run could repeat the same steps without end.
            self._in_a_row = 0
        is_last = self._in_a_row >= self._most
        if may_restart and is_last and (going_on := crew.lose(error.number, states)) is not None:
            after = f" after {count_text(self._in_a_row, 'restart')}" if self._in_a_row else ""
            self._report(f"{error}{after}: {going_on}")
            self.num_all += 1
            self._in_a_row = 0
            return
        if not may_restart or is_last:
            raise PipelineError(error.to_text(self._so_far())) from None
        self.num_all += 1
        self._in_a_row += 1
        self._report(f"{error}: restart {self._in_a_row} of {self._most}")

    def count_lost_node(self, error: NodeLost, states: Set[State], crew: Crew | NodeCrew, may_restart: bool) -> None:
        """Count the restart of those that can go on without a node. Raises PipelineError if they cannot."""
        self._newest.note(states)
        why = "all ranks had been asked to end"
        if may_restart and isinstance(crew, NodeCrew):
            try:
                self._report(f"{error}; {crew.lose_node(error.node, states)}")
            except (PlacementError, PlanError) as refusal:
                why = str(refusal)
            else:
                self.num_all += 1
                self._in_a_row = 0
                return
        raise PipelineError(
            f"{error}; the others cannot go on ({why}), so all ranks were ended. Start the command again on all nodes: "
            f"it goes on from the last checkpoint"
        ) from None

    def count_rejoining(self, crew: Crew | NodeCrew) -> None:
        """Count the restart in which lost ranks join again."""
        self.num_all += 1
        self._in_a_row = 0
        self._report(crew.rejoin())

    def _so_far(self) -> str:
        if not self.num_all:
            return ""
        without = f" without a newer checkpoint, {self.num_all} in all" if self.num_all > self._in_a_row else ""
        return f" after {count_text(self._in_a_row, 'restart')}{without}"
