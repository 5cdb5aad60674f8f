"""Kernels that compute nothing instead of compute, on a queued device: each op keeps it busy for as long as planned.

    host      enqueues the step: kernels, messages, events
    compute   ▣ 0F0 spins ▣ 0F1 spins            ▣ 0B0 spins
    0→1               ▣ sends ▣ sends
    1→0                             ▣ receives ───┘

Order, streams, channels and memory are those of a `Pipeline` on the device; only the ops' kernels are others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
import torch.distributed as dist

from rota.errors import PipelineError
from rota.plan import Plan
from rota.planning.rehearsal.allocation import RankMemory
from rota.planning.rehearsal.rank_step import RankStep, step_ends_ns
from rota.planning.rehearsal.timed_waits import formats_of, made_bytes, sleep_until, stages_of
from rota.profiling.spinning import Spinner
from rota.runtime.channels import Channels
from rota.runtime.compute import Batch
from rota.runtime.device.protocol import QueuedDevice
from rota.runtime.execution import Execution
from rota.runtime.meshes import Processes
from rota.runtime.microbatches import Microbatches
from rota.runtime.transport import Transport, collective
from rota.simulation import simulate
from rota.tasks import Kind, Op
from rota.units import size_text


@final
class SpinKernels:
    """Runs an `Execution`'s ops as kernels that spin. Collective: it makes process groups of ranks."""

    def __init__(self, plan: Plan, processes: Processes, device: QueuedDevice, memory: RankMemory | None) -> None:
        rank, tasks, stages = processes.rank, plan.placement.tasks, stages_of(plan.placement)
        self._device, self._memory = device, memory
        self._tasks = {(task.stage, task.kind): task for task in tasks if rank in task.ranks}
        self._plan, self._made = plan, made_bytes(plan.placement, stages, rank)
        together_on = sorted({task.ranks for task in tasks if len(task.ranks) > 1})
        self._groups = {ranks: processes.of_ranks(ranks, device.backend, device.torch_device) for ranks in together_on}
        self._meeting = torch.zeros(1, device=device.torch_device)
        self._spinner = Spinner(device)

    def begin(self, batch: Batch, seed: int) -> None:
        """A new step; nothing is computed."""

    def run(self, op: Op, received: list[Any]) -> list[Any]:  # noqa: ARG002 - nothing is computed
        """Enqueue kernels that last as long as the op; returns memory instead of its output."""
        task = self._tasks[op.stage, op.kind]
        if len(task.ranks) > 1:  # collectives in such a task would wait for its other ranks
            with collective(f"waiting for the other ranks of {task.ranks}"):
                dist.all_reduce(self._meeting, group=self._groups[task.ranks])
        if self._memory is not None:
            self._memory.op_starts(op)
        made = [self._buffer(num_bytes) for num_bytes in self._made(op)]
        self._spinner.spin(self._plan.duration_us(op))
        if self._memory is not None:
            self._memory.op_ends(op)
        return made if op.kind is Kind.F else [[gradient] for gradient in made]

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device.torch_device)


@final
class DeviceRank:
    """One rank of a rehearsal on a queued device, see `RehearsedRank`. Collective.

    Raises PipelineError if the device has less memory than the plan needs, where it is to be allocated.
    """

    def __init__(
        self, plan: Plan, processes: Processes, transport: Transport, device: QueuedDevice, allocate: bool
    ) -> None:
        rank, stages = processes.rank, stages_of(plan.placement)
        if allocate and (needed := simulate(plan).peak_memory_bytes[rank]) > (free := device.free_bytes()):
            raise PipelineError(
                f"rank {rank} needs {size_text(needed)}, and {device.torch_device} has {size_text(free)} free; "
                f"rehearse without allocate, or with smaller sizes"
            )
        device.begin()
        self.memory = RankMemory(plan.placement, rank, device) if allocate else None
        self._channels = Channels(plan, device, transport, processes)
        ops = SpinKernels(plan, processes, device, self.memory)
        self.execution = Execution(stages, plan, rank, transport, ops, device, self._channels)
        self.execution.formats = formats_of(plan, stages)
        self._reads = _columns_by_reader(plan, rank)

    def run(self, start_ns: int, tick: Callable[[], None]) -> RankStep:
        """See `RehearsedRank`."""
        sleep_until(start_ns)
        self.execution.run(Batch(Microbatches([]), Microbatches([]), []), 0, False, tick)
        self.execution.settle()
        record = self.execution.record
        return RankStep(
            record.starts_ns,
            record.ends_ns,
            self._late_ns(start_ns),
            [(*column, time_ns) for column, time_ns in record.sent_ns.items()],
            [(*column, time_ns) for column, (_, time_ns) in record.received_ns.items()],
            step_ends_ns(self.execution.plan, record.rank, start_ns, record.ends_ns),
            [(*column, time_ns) for column, (time_ns, _) in record.received_ns.items()],
        )

    def _late_ns(self, start_ns: int) -> list[int]:
        """How long after its planned end each op ended; it could begin with the op before and its last input."""
        record, plan = self.execution.record, self.execution.plan
        late_ns = []
        free_ns = start_ns
        for op, ended_ns in zip(plan.orders[record.rank], record.ends_ns, strict=True):
            ready_ns = max([free_ns, *(record.received_ns[column][1] for column in self._reads.get(op, ()))])
            late_ns.append(max(ended_ns - ready_ns - 1000 * plan.duration_us(op), 0))
            free_ns = ended_ns
        return late_ns

    def close(self) -> None:
        """Release the channels."""
        self._channels.close()


def _columns_by_reader(plan: Plan, rank: int) -> dict[Op, list[tuple[int, int]]]:
    """The messages to this rank, by (route, position), of each op that reads them."""
    found: dict[Op, list[tuple[int, int]]] = {}
    for r, route in enumerate(plan.placement.routes):
        target = plan.placement.tasks[route.target]
        if route.receiver == rank:
            for position, m in enumerate(plan.placement.microbatches(target.stage, plan.num_microbatches)):
                found.setdefault(Op(target.stage, target.kind, m), []).append((r, position))
    return found
