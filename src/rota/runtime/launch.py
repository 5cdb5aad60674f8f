"""Starts a script on every rank of a plan, on this machine, with torchrun's machinery.

When a rank fails all are ended, and started again as often as is allowed; requests to end are passed on to them.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple, final

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rota.checking import check
from rota.errors import PipelineError
from rota.plan import Plan
from rota.runtime.handover import ask_to_stop, collect, leave_plan, leave_restart
from rota.runtime.meshes import leave_mesh
from rota.runtime.recorder import merge
from rota.runtime.stopping import SIGNALS
from rota.runtime.stragglers import Straggler, stragglers
from rota.timeline import Timeline
from rota.units import count_text


class Run(NamedTuple):
    """How a run went: the last step's timeline (None if no Pipeline ran one) and who was slow, of the first replica.

    `ended_by`: the signal to this process that asked the ranks to end, if one did.
    """

    timeline: Timeline | None
    stragglers: list[Straggler]
    ended_by: signal.Signals | None


@final
class EndedBySignal(PipelineError):
    """All ranks were ended by a signal to the launcher, without a checkpoint."""

    def __init__(self, number: signal.Signals, why: str) -> None:
        super().__init__(f"ended by {number.name}, and all ranks with it{why}")
        self.number = number


def launch(
    plan: Plan,
    script: str,
    arguments: Sequence[str] = (),
    threads_per_rank: int = 1,
    worker: str = "rota.runtime.worker",
    dp: int = 1,
    tp: int = 1,
    max_restarts: int = 0,
    report: Callable[[str], None] = print,
) -> Run:
    """Run `script` with `arguments` in one process a rank; it gets the plan by `rota.given_plan()`.

    With `dp` replicas of `tp` parts each, there are dp · tp processes a rank, and `rota.mesh()` is that mesh.
    `worker` names the module that is started on each rank, and runs the script. When a process fails all others are
    ended and, up to `max_restarts` times, all started again, which `report` tells. SIGTERM and SIGUSR1 end the ranks
    after the step that is running, if the script looks at `pipeline.should_stop`; else, or when one comes again, at
    once.

    Raises PlanError before anything starts, PipelineError when a process fails, EndedBySignal.
    """
    check(plan)
    if not Path(script).is_file():
        raise PipelineError(f"no script {script!r}; give the path of a Python file")
    with tempfile.TemporaryDirectory(prefix="rota-run-") as folder:
        environment = leave_plan(plan, folder) | leave_mesh(plan.num_ranks, dp, tp)
        environment["OMP_NUM_THREADS"] = str(threads_per_rank)
        command = ("-u", "-P", "-m", worker, script, *arguments)  # -P: the folder must not shadow what torch imports
        before = dict(os.environ)
        os.environ.update(environment)  # inherited by the ranks
        try:
            with _passing_on(folder) as signals:
                _start_again(plan.num_ranks * dp * tp, command, folder, max_restarts, signals, report)
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise EndedBySignal(signals.ended_by or error.sigval, signals.why) from None
        except Exception:
            if signals.ended_by is not None:  # the agent was at something that took it for an error
                raise EndedBySignal(signals.ended_by, signals.why) from None
            raise
        finally:
            os.environ.clear()
            os.environ.update(before)
        records = collect(plan, folder)
        return Run(merge(plan, records) if records else None, stragglers(plan, records), signals.asked)


def _start_again(
    num_processes: int,
    command: Sequence[str],
    folder: str,
    max_restarts: int,
    signals: _Signals,
    report: Callable[[str], None],
) -> None:
    """Start all processes until they end well, or have failed once more than they may."""
    for restart in range(max_restarts + 1):
        os.environ.update(leave_restart(restart))
        try:
            _start(num_processes, command, folder)
            return
        except RankFailed as error:
            if signals.asked is not None or restart == max_restarts:
                after = f" after {count_text(restart, 'restart')}" if restart else ""
                raise PipelineError(
                    f"{error} first{after}, and the others were ended; see above for what it wrote"
                ) from None
            report(f"{error}: restart {restart + 1} of {max_restarts}")


class RankFailed(Exception):
    """A rank ended as it should not have; in words."""


def _start(num_processes: int, command: Sequence[str], folder: str) -> None:
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
        signals_to_handle="SIGINT,SIGHUP,SIGQUIT",  # those of `SIGNALS` are ours
    )
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # our one line says it
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == -signal.SIGINT:
            raise KeyboardInterrupt from None
        raise RankFailed(f"rank {rank} ended with {_told(failure.exitcode)}") from None


def _told(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    number = -exit_code
    return signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"


@final
class _Signals:
    """SIGTERM and SIGUSR1 to this process."""

    def __init__(self, folder: str) -> None:
        #: What the ranks were asked by to end after their step; what they are ended by at once, and why at once.
        self.asked: signal.Signals | None = None
        self.ended_by: signal.Signals | None = None
        self.why = ""
        self._folder = folder

    def handle(self, number: int, _: FrameType | None) -> None:
        if self.asked is None and ask_to_stop(self._folder):
            self.asked = signal.Signals(number)
            return
        self.ended_by = signal.Signals(number)
        self.why = ": a second one" if self.asked else ": the script has not looked at pipeline.should_stop"
        # Ranks that look at `should_stop` would wait for the end of a step: nothing but SIGKILL ends them at once.
        raise SignalException("ended", signal.SIGTERM if self.asked is None else signal.SIGKILL)


@contextmanager
def _passing_on(folder: str) -> Iterator[_Signals]:
    """Handles these signals meanwhile; on the main thread, where Python lets handlers be set."""
    signals = _Signals(folder)
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, signals.handle) for number in SIGNALS} if is_main else {}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
