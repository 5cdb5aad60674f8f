"""One rank of a rehearsal: the runtime's loop over the plan, with timed waits in place of compute."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist

from rota.plan import Plan
from rota.planning.rehearsal.allocation import RankMemory
from rota.planning.rehearsal.timed_waits import Arrivals, TimedWaits, formats_of, sleep_until, stages_of
from rota.runtime.compute import Batch
from rota.runtime.device.host import HostDevice
from rota.runtime.execution import Execution
from rota.runtime.faults.watchdog import Watchdog
from rota.runtime.meshes import Processes
from rota.runtime.microbatches import Microbatches
from rota.runtime.transport import Transport

_HEAD_START_NS, _HEAD_START_PER_RANK_NS = 2_000_000, 500_000  # for all ranks to receive the time at which a step begins


@dataclass(slots=True)
class RankStep:
    """One step of one rank, in ns of the machine's monotonic clock.

    The first three are by op, in the rank's order. Messages are (route, position, time). Step ends are (start, end) of
    the reduction and of the optimizer step, in the order of `Plan.step_end_ranks`.
    """

    starts_ns: list[int]
    ends_ns: list[int]
    late_ns: list[int]
    sent: list[tuple[int, int, int]]
    arrived: list[tuple[int, int, int]]
    step_ends_ns: list[tuple[int, int, int, int]]


@dataclass(slots=True)
class RankReport:
    """All steps of one rank, and the most bytes that its ops' buffers and its process had, if it allocated."""

    rank: int
    steps: list[RankStep] = field(default_factory=list)
    held_bytes: int | None = None
    process_bytes: int | None = None

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankReport:
        """The report that `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "steps": [RankStep(**step) for step in fields["steps"]]})


def run_rank(
    plan: Plan, num_steps: int, allocate: bool, timeout_s: float, step_ended: Callable[[int], None] = lambda _: None
) -> RankReport:
    """Rehearse this process's rank of a checked plan: one step to warm up and `num_steps` more.

    Collective: every rank is one process of the default group. `step_ended` gets the number of steps that ended.
    """
    processes = Processes(None)
    rank, placement = processes.rank, plan.placement
    stages = stages_of(placement)
    transport = Transport(processes.pipeline, processes.everyone)
    arrivals = Arrivals()
    transport.watched = arrivals.watch
    memory = RankMemory(placement, rank) if allocate else None
    waiting = TimedWaits(plan, stages, rank, arrivals, memory)
    execution = Execution(stages, plan, rank, transport, waiting, HostDevice())
    execution.formats = formats_of(plan, stages)
    watchdog = Watchdog(timeout_s)
    watchdog.names, watchdog.last = processes.names, execution.last
    report = RankReport(rank)
    try:
        for num_ended in range(1, num_steps + 2):
            report.steps.append(_step(execution, transport, watchdog, memory))
            step_ended(num_ended)
        with watchdog.watching("the other ranks to end their last step"):
            _common_start_ns(transport)  # a rank that leaves earlier would count as lost
    finally:
        watchdog.close()
        arrivals.close()
        transport.close()
    del report.steps[0]
    if memory is not None:
        report.held_bytes, report.process_bytes = memory.peak_bytes, memory.process_bytes
    return report


def _step(
    execution: Execution[TimedWaits], transport: Transport, watchdog: Watchdog, memory: RankMemory | None
) -> RankStep:
    waiting = execution.compute
    execution.awaited = "the other ranks to reach the same step"
    with watchdog.watching(execution.doing):
        if memory is not None:
            memory.begin_step()
        waiting.start_ns = _common_start_ns(transport)
        execution.run(Batch(Microbatches([]), Microbatches([]), []), 0, False, watchdog.tick)
        execution.settle()
    step_ends = _step_ends_ns(execution)
    sleep_until(max((end[-1] for end in step_ends), default=0))
    sent = [(*column, sent_ns) for column, sent_ns in execution.record.sent_ns.items()]
    arrived = [(*column, time_ns) for column, time_ns in waiting.arrivals.times_ns.items()]
    return RankStep(waiting.starts_ns, waiting.ends_ns, waiting.late_ns, sent, arrived, step_ends)


def _common_start_ns(transport: Transport) -> int:
    """A time shortly after the last rank has reached this line."""
    head_start_ns = _HEAD_START_NS + _HEAD_START_PER_RANK_NS * dist.get_world_size()
    start = torch.tensor([time.monotonic_ns() + head_start_ns])
    transport.all_reduce(start, dist.ReduceOp.MAX, "waiting for the others to begin the step")
    return int(start)


def _step_ends_ns(execution: Execution[TimedWaits]) -> list[tuple[int, int, int, int]]:
    """Reductions overlap the ops, each after its stage's last gradient; the optimizer steps follow."""
    plan, waiting, rank = execution.plan, execution.compute, execution.record.rank
    order = plan.orders[rank]
    ends = [plan.placement.step_ends[i] for i, of_rank in plan.step_end_ranks if of_rank == rank]
    reduced_ns, reductions = waiting.start_ns, []
    for end in ends:
        gradients = (
            ended
            for op, ended in zip(order, waiting.ends_ns, strict=True)
            if op.stage == end.stage and op.kind.makes_weight_gradients
        )
        reduce_ns = max([reduced_ns, *gradients])
        reduced_ns = reduce_ns + 1000 * end.reduce_us
        reductions.append((reduce_ns, reduced_ns))
    free_ns = max([reduced_ns, *waiting.ends_ns[-1:]])
    step_ends = []
    for end, reduction in zip(ends, reductions, strict=True):
        step_ends.append((*reduction, free_ns, free_ns + 1000 * end.optimizer_us))
        free_ns += 1000 * end.optimizer_us
    return step_ends
