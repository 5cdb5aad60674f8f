"""Timed waits instead of compute: a simulated device that is busy for as long as the plan says.

    device    █ 0F1 █████ 0F2 ████            █ 0B0 ██████     busy from when it is free and the inputs are there
    process   ‥‥ asleep │‥‥ asleep │‥‥ waits  ‥‥ asleep   │    ‥ the runtime's own work, beside the op

A GPU gets an op while it still runs the previous one. So an op here begins when the device is free and its inputs
have arrived, even if the process gets to it later, and ends at a fixed time. If the process gets there after that
time, it would have been too late to submit the op: the op ends late.

What messages cost their ranks, and gaps between ops, are waits too, as far as the plan counts them: before the op and
after it, as in a simulation.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, final

import torch
import torch.distributed as dist

from rota.models import Stages
from rota.placement import Placement
from rota.plan import Plan
from rota.planning.rehearsal.allocation import RankMemory, touched
from rota.programs.actions import Message, ValueKey
from rota.runtime import spmd
from rota.runtime.compute import Batch
from rota.runtime.messages import Format
from rota.runtime.transport import collective
from rota.tasks import Kind, Op


@final
class TimedWaits:
    """Runs an `Execution`'s ops as waits. Collective: it makes process groups of ranks.

    Set `start_ns`, when the device is free, before each step. `starts_ns`, `ends_ns`, `free_ns` (the end with what the
    op's messages cost its rank) and `late_ns` (how long after that the process got there) are by op, in the rank's
    order, in ns of the monotonic clock.
    """

    def __init__(self, plan: Plan, stages: Stages, rank: int, arrivals: Arrivals, memory: RankMemory | None) -> None:
        tasks = plan.placement.tasks
        self.arrivals, self._memory = arrivals, memory
        self._tasks = {(task.stage, task.kind): task for task in tasks if rank in task.ranks}
        self._plan, self._made = plan, made_bytes(plan.placement, stages, rank)
        together_on = sorted({task.ranks for task in tasks if len(task.ranks) > 1})
        self._groups = {ranks: spmd.group(ranks) for ranks in together_on}
        self.start_ns = 0
        self.starts_ns: list[int] = []
        self.ends_ns: list[int] = []
        self.free_ns: list[int] = []
        self.late_ns: list[int] = []

    def begin(self, batch: Batch, seed: int) -> None:  # noqa: ARG002 - nothing is computed
        """A new step, which begins at `start_ns`."""
        self.arrivals.latest_ns = self.start_ns
        self.arrivals.times_ns = {}
        self.starts_ns, self.ends_ns, self.free_ns, self.late_ns = [], [], [], []

    def run(self, op: Op, received: list[Any]) -> list[Any]:  # noqa: ARG002 - nothing is computed
        """Wait for the op's duration and what its messages cost; returns bytes instead of its output."""
        task = self._tasks[op.stage, op.kind]
        ready_ns = max([self.arrivals.latest_ns, *self.free_ns[-1:]])
        if len(task.ranks) > 1:
            ready_ns = self._latest(task.ranks, ready_ns)
        if self._memory is not None:
            self._memory.op_starts(op)
        make = touched if self._memory is not None else _untouched
        made = [make(num_bytes) for num_bytes in self._made(op)]
        before_ns, after_ns = (1000 * us for us in self._plan.occupied_us(op))
        duration_ns = 1000 * self._plan.duration_us(op)
        due_ns = ready_ns + before_ns + duration_ns + after_ns
        slept = sleep_until(due_ns)
        if self._memory is not None:
            self._memory.op_ends(op)
        now_ns = time.monotonic_ns()
        self.free_ns.append(due_ns if slept else now_ns)
        self.ends_ns.append(self.free_ns[-1] - after_ns)
        self.starts_ns.append(self.ends_ns[-1] - duration_ns)
        self.late_ns.append(now_ns - due_ns)
        return made if op.kind is Kind.F else [[gradient] for gradient in made]

    def _latest(self, ranks: tuple[int, ...], ready_ns: int) -> int:
        """When the last of a task's ranks is ready: collectives in such a task would wait for it."""
        latest = torch.tensor([ready_ns])
        with collective(f"waiting for the other ranks of {ranks}"):
            dist.all_reduce(latest, dist.ReduceOp.MAX, self._groups[ranks])
        return int(latest)


def sleep_until(time_ns: int) -> bool:
    """Sleep until a time of the monotonic clock; returns whether it was still ahead."""
    left_ns = time_ns - time.monotonic_ns()
    if left_ns > 0:
        time.sleep(left_ns / 1e9)
    return left_ns > 0


def _untouched(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def stages_of(placement: Placement) -> Stages:
    """Empty stages with the plan's edges."""
    return Stages([torch.nn.Identity() for _ in placement.stages], placement.stage_edges)


def formats_of(plan: Plan, stages: Stages) -> dict[ValueKey, Format]:
    """Formats of each boundary's values and gradients: as many bytes as the plan says."""
    of_class = [_formats_of(placement, stages) for placement in plan.placement.classes]
    return {
        (i, False, m): of_class[plan.placement.class_in(m)][i]
        for i in range(len(stages.edges))
        for m in range(plan.num_microbatches)
    }


def _formats_of(placement: Placement, stages: Stages) -> list[Format]:
    """The format of each boundary for micro-batches that are alike."""
    sizes: dict[tuple[int, int, bool], int] = {}
    for source, target, num_bytes in placement.edges:
        a, b = placement.tasks[source], placement.tasks[target]
        sizes[a.stage, b.stage, a.kind is not Kind.F] = num_bytes
    formats = []
    for a_stage, b_stage, _ in stages.edges:
        form = Format(("tensor", "uint8", (sizes[a_stage, b_stage, False],), False))
        form.gradients = [((sizes.get((b_stage, a_stage, True), 0),), torch.uint8)]  # may be of another size here
        formats.append(form)
    return formats


def made_bytes(placement: Placement, stages: Stages, rank: int) -> Callable[[Op], list[int]]:
    """A function of an op on `rank`: the bytes of its outputs, in the order of its edges; 0 if another rank sends."""
    keys = [(task.stage, task.kind) for task in placement.tasks if rank in task.ranks]
    of_class = [{key: _made_bytes(each, stages, rank, *key) for key in keys} for each in placement.classes]
    return lambda op: of_class[placement.class_in(op.microbatch)][op.stage, op.kind]


def _made_bytes(placement: Placement, stages: Stages, rank: int, stage: int, kind: Kind) -> list[int]:
    task = placement.index[stage, kind]
    sizes = {
        placement.tasks[r.target].stage: r.num_bytes for r in placement.routes if (r.source, r.sender) == (task, rank)
    }
    if kind is Kind.F:
        return [sizes.get(edge.target, 0) for edge in stages.outgoing(stage)]
    if kind in (Kind.B, Kind.I):
        return [sizes.get(edge.source, 0) for edge in stages.incoming(stage)]
    return []


@final
class Arrivals:
    """When messages arrive, even before anything waits for them: one thread per sender waits for them in turn.

    `times_ns` is by (route, position) as in a timeline; `latest_ns` is the latest of those that were taken.
    """

    def __init__(self) -> None:
        self.times_ns: dict[tuple[int, int], int] = {}
        self.latest_ns = 0
        self._posted: dict[int, queue.SimpleQueue[_Arrival | None]] = {}

    def watch(self, message: Message, works: list[Any]) -> list[Any]:
        """The object to wait for instead of a posted receive's works."""
        sender = message.transfer.sender
        if sender not in self._posted:
            self._posted[sender] = queue.SimpleQueue()
            threading.Thread(target=_note, args=(self._posted[sender],), name="rota-arrivals", daemon=True).start()
        arrival = _Arrival(self, message.column, works)
        self._posted[sender].put(arrival)
        return [arrival]

    def close(self) -> None:
        """End the senders' threads, after the messages that they already wait for."""
        for posted in self._posted.values():
            posted.put(None)


class _Arrival:
    def __init__(self, arrivals: Arrivals, column: tuple[int, int], works: list[Any]) -> None:
        self.arrivals, self.column, self.works = arrivals, column, works
        self.there = threading.Lock()
        self.there.acquire()
        self.time_ns = 0
        self.error: RuntimeError | None = None

    def wait(self) -> None:
        self.there.acquire()
        if self.error is not None:
            raise self.error
        self.arrivals.latest_ns = max(self.arrivals.latest_ns, self.time_ns)
        self.arrivals.times_ns[self.column] = self.time_ns


def _note(posted: queue.SimpleQueue[_Arrival | None]) -> None:
    """Wait for all that is posted, in the order of its arrival, until None."""
    while (arrival := posted.get()) is not None:
        try:
            for work in arrival.works:
                work.wait()
        except RuntimeError as error:
            arrival.error = error
        arrival.time_ns = time.monotonic_ns()
        arrival.there.release()
