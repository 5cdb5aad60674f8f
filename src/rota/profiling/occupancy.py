"""What messages cost the ranks that compute: how much longer ops of a known length take beside them; gaps between ops.

    alone      work │ work │ work │ work │ work
    sender     work, send │ work, send │ …                    slots: each has one message's cost, wherever in it the
    receiver   work, take, post │ work, take, post │ …        process or its threads pay for it

All ranks compute meanwhile, as in a pipeline. A receiver takes a message some slots after it was sent, so that it never
waits for it. Where ranks have cores of their own, the slots' time counts. On a host with fewer cores than ranks, slots
are torn apart by the other ranks; there the processor time of the process and its threads counts, once for every rank
that shares the core.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist

from rota.cluster import Cluster
from rota.costs import Costs
from rota.models import Stages
from rota.placing import place
from rota.plan import Plan
from rota.profiling.host_messages import Wire
from rota.runtime.compute import Batch
from rota.runtime.device.host import HostDevice
from rota.runtime.execution import Execution
from rota.runtime.microbatches import Microbatches
from rota.runtime.transport import Transport
from rota.tasks import Kind, Op

SIZES = (1, 1 << 16, 1 << 18, 1 << 20, 1 << 22)  # up to 4 MiB
WORK_US = 1000.0  # of a slot
_AHEAD = 6  # slots from a send to its take: far longer than messages travel, so that no rank waits for one
_SLOTS = 10  # that count, of a measurement
_WINDOW_NS = 60_000_000  # to see what else uses the cores: several turns of ranks that share one
_MICROBATCHES = 32  # of a step that computes nothing
_WIDTH = 64  # of the matrices: they stay in the core's cache


@final
class Work:
    """Compute of a known length: small matrix products, as ops are made of, with Python in between."""

    def __init__(self, duration_us: float) -> None:
        self._matrix, self._out = torch.full((_WIDTH, _WIDTH), 1e-3), torch.empty(_WIDTH, _WIDTH)
        self._count = 16
        self._count = max(round(16 * duration_us / min(self._timed_us() for _ in range(20))), 1)

    def __call__(self) -> None:
        """Compute."""
        for _ in range(self._count):
            torch.mm(self._matrix, self._matrix, out=self._out)

    def _timed_us(self) -> float:
        begun_ns = time.perf_counter_ns()
        self()
        return (time.perf_counter_ns() - begun_ns) / 1000


class Slots(NamedTuple):
    """Of a slot, in µs: its time, the median one; and all threads' processor time for messages, on average."""

    us: float
    processor_us: float


def processor_share(wire: Wire, work: Work) -> float:
    """The part of a core that this rank's thread gets while all ranks compute. Collective."""
    wire.wait_for_all()
    begun_ns, thread_ns = time.perf_counter_ns(), time.thread_time_ns()
    while (passed_ns := time.perf_counter_ns() - begun_ns) < _WINDOW_NS:
        work()
    return (time.thread_time_ns() - thread_ns) / passed_ns


def slots_beside(wire: Wire, work: Work, sends_to: int | None, takes_from: int | None, num_bytes: int) -> Slots:
    """Slots of work, each with a message to one rank or from one; without messages if both are None. Collective."""
    wire.wait_for_all()
    num_slots, times, work_ns = _AHEAD + _SLOTS, [], 0
    keys = [wire.post(takes_from, num_bytes, number) for number in range(_AHEAD)] if takes_from is not None else []
    processor_ns = time.process_time_ns()
    for number in range(num_slots):
        begun_ns, thread_ns = time.perf_counter_ns(), time.thread_time_ns()
        work()
        work_ns += time.thread_time_ns() - thread_ns
        if sends_to is not None:
            wire.send(sends_to, torch.empty(num_bytes, dtype=torch.uint8), number)
        if takes_from is not None and number >= _AHEAD:
            wire.take(keys[number - _AHEAD])
        if takes_from is not None and number + _AHEAD < num_slots:
            keys.append(wire.post(takes_from, num_bytes, number + _AHEAD))
        times.append((time.perf_counter_ns() - begun_ns) / 1000)
    for key in keys[num_slots - _AHEAD :]:
        wire.take(key)
    wire.drain()
    processor_us = (time.process_time_ns() - processor_ns - work_ns) / 1000 / num_slots
    return Slots(median(times[_AHEAD:]), processor_us)


def costs_beside_work(
    wire: Wire, work: Work, pairs: Sequence[tuple[int, int]], repeats: int, by_processor: bool
) -> dict[str, list[list[float]]]:
    """What messages cost this rank as the sender or the receiver of one of the pairs, in µs. Collective.

    Args:
        wire: This process's.
        work: Of a slot.
        pairs: Senders and receivers; no rank is in two. They exchange messages at once, and other ranks compute.
        repeats: Number of measurements.
        by_processor: Whether processor time counts, see above.

    Returns:
        By "send" or "receive": for each of `SIZES` what each repeat has found; nothing on a rank of no pair.
    """
    to = next((receiver for sender, receiver in pairs if sender == wire.rank), None)
    source = next((sender for sender, receiver in pairs if receiver == wire.rank), None)
    found = []
    for size in SIZES:
        differences = []
        for _ in range(1 + repeats):
            beside = slots_beside(wire, work, to, source, size)
            if by_processor:
                differences.append(beside.processor_us)
            else:
                differences.append(beside.us - slots_beside(wire, work, None, None, 0).us)
        found.append(differences[1:])
    return {} if to is source is None else {"send" if source is None else "receive": found}


# --- between ops ------------------------------------------------------------------------------------------------------


@final
class _NoWork:
    """Runs ops that compute nothing."""

    def __init__(self, stages: Stages) -> None:
        self._stages, self._value = stages, torch.zeros(1)

    def begin(self, batch: Batch, seed: int) -> None:
        """A new step."""

    def run(self, op: Op, received: list[Any]) -> list[Any]:  # noqa: ARG002 - nothing is computed
        """See `RunsOps`."""
        if op.kind is Kind.F:
            return [self._value for _ in self._stages.outgoing(op.stage)]
        return [[self._value] for _ in self._stages.incoming(op.stage)]


def gaps_between_ops(repeats: int) -> list[float]:
    """Times between the end of an op and the start of the next one, in the runtime's loop, in µs. Collective.

    Every rank runs steps of two stages that compute nothing, by itself: there is no message in a gap.

    Returns:
        The median of each step.
    """
    group = dist.group.WORLD
    assert group is not None
    stages, found = Stages([torch.nn.Identity(), torch.nn.Identity()]), []
    transport = Transport(group, group)
    try:
        execution = Execution(stages, _steps_of_two_stages(), 0, transport, _NoWork(stages), HostDevice())
        for _ in range(1 + repeats):
            execution.run(Batch(Microbatches([]), Microbatches([]), []), 0, False, lambda: None)
            execution.settle()
            of = execution.record
            found.append(median(b - a for a, b in zip(of.ends_ns, of.starts_ns[1:], strict=False)) / 1000)
    finally:
        transport.close()
    return found[1:]


def _steps_of_two_stages() -> Plan:
    placement = place(Costs.uniform(2), Cluster.uniform(1), ranks=[0, 0])
    ops = ((0, Kind.F), (1, Kind.F), (1, Kind.B), (0, Kind.B))
    order = tuple(Op(stage, kind, microbatch) for microbatch in range(_MICROBATCHES) for stage, kind in ops)
    return Plan(placement, _MICROBATCHES, (order,))
