"""One rank of a rehearsal: the runtime's loop over the plan, with timed waits or kernels instead of compute."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, final

import torch
import torch.distributed as dist

from rota.plan import Plan
from rota.planning.rehearsal.allocation import RankMemory
from rota.planning.rehearsal.rank_step import RankReport, RankStep, num_warm_ups, step_ends_ns
from rota.planning.rehearsal.spin_kernels import DeviceRank
from rota.planning.rehearsal.timed_waits import Arrivals, TimedWaits, formats_of, sleep_until, stages_of
from rota.runtime.compute import Batch
from rota.runtime.device.choosing import device_at
from rota.runtime.device.host import HostDevice
from rota.runtime.device.protocol import is_queued
from rota.runtime.execution import Execution
from rota.runtime.faults.watchdog import Watchdog
from rota.runtime.meshes import Processes
from rota.runtime.microbatches import Microbatches
from rota.runtime.transport import Transport

_HEAD_START_NS, _HEAD_START_PER_RANK_NS = 2_000_000, 500_000  # for all ranks to receive the time at which a step begins
_CPU = torch.device("cpu")


class RehearsedRank(Protocol):
    """What runs this rank's steps."""

    execution: Execution[Any]
    memory: RankMemory | None

    def run(self, start_ns: int, tick: Callable[[], None]) -> RankStep:
        """Run a step that begins at `start_ns`; its ops have ended when it returns. `tick` is called before actions."""

    def close(self) -> None:
        """Release what it holds."""


@final
class HostRank:
    """One rank with timed waits and messages between CPUs, see `RehearsedRank`. Collective."""

    def __init__(self, plan: Plan, processes: Processes, transport: Transport, allocate: bool) -> None:
        rank, stages = processes.rank, stages_of(plan.placement)
        self._arrivals, self._transport = Arrivals(), transport
        self.memory = RankMemory(plan.placement, rank) if allocate else None
        waiting = TimedWaits(plan, stages, rank, self._arrivals, self.memory)
        self.execution = Execution(stages, plan, rank, transport, waiting, HostDevice())
        self.execution.formats = formats_of(plan, stages)

    def run(self, start_ns: int, tick: Callable[[], None]) -> RankStep:
        """See `RehearsedRank`."""
        waiting = self.execution.compute
        waiting.start_ns, self._transport.watched = start_ns, self._arrivals.watch
        self.execution.run(Batch(Microbatches([]), Microbatches([]), []), 0, False, tick)
        self.execution.settle()
        record = self.execution.record
        return RankStep(
            waiting.starts_ns,
            waiting.ends_ns,
            waiting.late_ns,
            [(*column, sent_ns) for column, sent_ns in record.sent_ns.items()],
            [(*column, time_ns) for column, time_ns in self._arrivals.times_ns.items()],
            step_ends_ns(self.execution.plan, record.rank, start_ns, waiting.free_ns),
        )

    def close(self) -> None:
        """End the threads that wait for messages."""
        self._arrivals.close()


def run_rank(
    plans: Sequence[Plan],
    num_steps: int,
    allocate: bool,
    timeout_s: float,
    step_ended: Callable[[int], None] = lambda _: None,
    device: torch.device = _CPU,
) -> RankReport:
    """Rehearse this process's rank of checked plans: warm-up steps of the first, then `num_steps` of each.

    Collective: every rank is one process of the default group. `step_ended` gets the number of steps that ended.
    `device`: this rank's; several plans run on the CPU alone, where each is prepared while the one before it runs.
    """
    processes = Processes(None)
    transport = Transport(processes.pipeline, processes.everyone)
    watchdog = Watchdog(timeout_s)
    watchdog.names = processes.names
    report = RankReport(processes.rank)
    made: list[RehearsedRank] = []

    def prepared(plan: Plan) -> RehearsedRank:
        if is_queued(own):
            made.append(DeviceRank(plan, processes, transport, own, allocate))
        else:
            made.append(HostRank(plan, processes, transport, allocate))
        return made[-1]

    try:
        with watchdog.watching("the other ranks to set up"):
            own = device_at(device)
            rehearsed = prepared(plans[0])
        try:
            with ThreadPoolExecutor(1, "rota-next-plan") as beside:
                for i in range(len(plans)):
                    following = beside.submit(prepared, plans[i + 1]) if i + 1 < len(plans) else None
                    warm_ups = num_warm_ups(plans[0]) if i == 0 else 0
                    _run_steps(rehearsed, warm_ups + num_steps, transport, watchdog, report, step_ended)
                    if following is not None:
                        rehearsed.close()
                        rehearsed = following.result()
            with watchdog.watching("the other ranks to end their last step"):
                _common_start_ns(transport)  # a rank that leaves earlier would count as lost
        finally:
            for each in made:
                each.close()
    finally:
        watchdog.close()
        transport.close()
    del report.steps[: num_warm_ups(plans[0])]
    if rehearsed.memory is not None:
        report.held_bytes, report.process_bytes = rehearsed.memory.peak_bytes, rehearsed.memory.process_bytes
    return report


def _run_steps(
    rehearsed: RehearsedRank,
    num_steps: int,
    transport: Transport,
    watchdog: Watchdog,
    report: RankReport,
    step_ended: Callable[[int], None],
) -> None:
    execution = rehearsed.execution
    watchdog.last, watchdog.num_reached = execution.last, execution.num_reached
    for _ in range(num_steps):
        report.steps.append(_step(rehearsed, transport, watchdog))
        step_ended(len(report.steps))


def _step(rehearsed: RehearsedRank, transport: Transport, watchdog: Watchdog) -> RankStep:
    execution = rehearsed.execution
    execution.awaited = "the other ranks to reach the same step"
    with watchdog.watching(execution.doing):
        if rehearsed.memory is not None:
            rehearsed.memory.begin_step()
        step = rehearsed.run(_common_start_ns(transport), watchdog.tick)
    sleep_until(max((end[-1] for end in step.step_ends_ns), default=0))
    return step


def _common_start_ns(transport: Transport) -> int:
    """A time shortly after the last rank has reached this line."""
    head_start_ns = _HEAD_START_NS + _HEAD_START_PER_RANK_NS * dist.get_world_size()
    start = torch.tensor([time.monotonic_ns() + head_start_ns])
    transport.all_reduce(start, dist.ReduceOp.MAX, "waiting for the others to begin the step")
    return int(start)
