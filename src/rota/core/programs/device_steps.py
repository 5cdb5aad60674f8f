"""What one rank enqueues on its device in a step: kernels on streams, and the events that order them.

    host        allocate a   run 1F0   receive a        send b      run 1F1   release b
    compute     ● event      ▣                                      ▣ waits   ● waits
                  │           │ event                                 ▲          ▲
    0→1           └──────────────────▶ ▣ waits ─── event ─────────────┘          │
    1→2                       └───────────────────────▶ ▣ waits ─── event ───────┘

The steps keep the strict order of `Plan.wire_order`. Each pair of neighbours has a stream and a communicator for each
direction. A receive's kernel is enqueued at its strict place, but may start when its buffer is allocated: with the op
during which the plan has the message sent. `device_order` proves that these lists cannot hang; the runtime executes the
same lists.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, NamedTuple, TypeAlias

from rota.core.plan import Plan
from rota.core.programs.actions import (
    NUM_OPS_AHEAD,
    Action,
    Message,
    Program,
    compile_programs,
    last_gradients,
    prefetch_receives,
)
from rota.core.simulation import simulate
from rota.core.tasks import Op, Transfer
from rota.core.timeline import Timeline

COMPUTE = "compute"  # the caller's current stream
REPLICAS = "replicas"


class Communicator(NamedTuple):
    """The ranks that enqueue the same operations in the same order; of a channel the sender, then the receiver."""

    use: Literal["channel", "stage", "tied"]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        if self.use == "channel":
            return f"channel {self.ranks[0]}→{self.ranks[1]}"
        what = "stages" if self.use == "stage" else "tied weights"
        return f"{what} on ranks {', '.join(map(str, self.ranks))}"


What: TypeAlias = Literal["allocate", "receive", "run", "send", "release", "reduce", "sum", "join"]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a rank's host thread: a stream waits for events and gets a kernel.

    Attributes:
        what: "receive", "run" and "send" are the plan's actions. "allocate" gets memory for a receive from the pool of
            the compute stream. "release" returns the memory of what was sent to that pool. "reduce" starts to sum
            gradients over replicas. "sum" sums gradients of tied weights. "join" only waits. Steps of type "allocate",
            "release" and "join" have no kernel: they order the memory and the kernels that come after them.
        stream: `COMPUTE`, `REPLICAS`, or the name of a communicator.
        subject: The op that runs or whose gradients are reduced, the transfer, or the ranks of tied weights.
        waits: The positions of the rank's earlier steps that the stream waits for.
        communicator: The communicator that the kernel uses; None if it meets no other rank.
        message: The message, for "allocate", "receive", "send" and "release".
    """

    what: What
    stream: str
    subject: Op | Transfer | tuple[int, ...] | None = None
    waits: tuple[int, ...] = ()
    communicator: Communicator | None = None
    message: Message | None = None

    @property
    def has_kernel(self) -> bool:
        """Whether the step enqueues a kernel, rather than only waits and events."""
        return self.what not in ("allocate", "release", "join")

    def __str__(self) -> str:
        if self.subject is None:
            return self.what
        if self.what == "sum":
            return f"sum of {self.communicator}"
        return f"{self.what} {self.subject}"


@dataclass(frozen=True, slots=True)
class DeviceProgram:
    """Everything that a rank enqueues in a step, in this order."""

    rank: int
    steps: tuple[Step, ...]

    @property
    def awaited(self) -> frozenset[int]:
        """The steps after which an event is recorded on their stream, because later ones wait for them."""
        return frozenset(before for step in self.steps for before in step.waits)


def channel(transfer: Transfer) -> Communicator:
    """The communicator of a transfer: of the directed pair of its ranks."""
    return Communicator("channel", (transfer.sender, transfer.receiver))


def device_programs(plan: Plan, *, tied: Iterable[tuple[int, ...]] = (), replicas: bool = True) -> list[DeviceProgram]:
    """What all ranks enqueue in a step.

    Args:
        plan: The plan. Edges are numbered in the order in which they occur, so it need not fit a model.
        tied: The ranks of each group of tied weights, in the order of their sums.
        replicas: Whether gradients are reduced over replicas of the pipeline.

    Returns:
        The program of each rank.

    Raises:
        PlanError: Ops are missing or misplaced, or the orders wait in a cycle.
    """
    edge_index: dict[tuple[int, int], int] = defaultdict(count().__next__)
    groups, timeline = [*tied], simulate(plan)
    return [
        device_program(timeline, program, tied=groups, replicas=replicas)
        for program in compile_programs(plan, edge_index, range(plan.num_ranks))
    ]


def device_program(
    timeline: Timeline,
    program: Program,
    *,
    tied: Sequence[tuple[int, ...]] = (),
    replicas: bool = True,
    allocates_early: bool = True,
) -> DeviceProgram:
    """What one rank enqueues in a step: its actions in the strict order, with memory, events and collectives.

    `timeline`: the simulated plan. `program`: the rank's program of this plan. `allocates_early`: not where the host
    learns the size of a buffer from the message itself.
    """
    steps, plan = _Steps(), timeline.plan
    allocations = _early_allocations(timeline, program) if allocates_early else defaultdict(list)
    releases = _releases(timeline, program)
    reductions = {*last_gradients(plan, program.rank).values()} if replicas else set()
    due: Op | None = None  # its gradients are reduced once its outputs are sent
    num_ops = 0
    for action in program.actions:
        if action.message is not None:
            (steps.receive if action.what == "receive" else steps.send)(action.message)
            continue
        if due is not None:
            steps.reduce(due)
        for message in releases[num_ops]:
            steps.release(message)
        for message in allocations[num_ops]:
            steps.allocate(message)
        steps.run(action.op, plan.placement.tasks[plan.placement.index[action.op[:2]]].ranks)
        due = action.op if action.op in reductions else None
        num_ops += 1
    if due is not None:
        steps.reduce(due)
    for message in releases[num_ops]:
        steps.release(message)
    steps.end([ranks for ranks in tied if program.rank in ranks])
    return DeviceProgram(program.rank, tuple(steps.steps))


def _early_allocations(timeline: Timeline, program: Program) -> dict[int, list[Message]]:
    """The buffers to allocate before their receives are enqueued, by the number of ops before the allocation.

    From its allocation on, a receive's kernel may start, and then it keeps multiprocessors until the sender is ready.
    So the allocation is right before the op during which the plan has the message sent: later would delay the message.
    """
    ends_us = timeline.ends_us[program.rank]
    strict = dict(_num_ops_before_receives(program.actions))
    early = _num_ops_before_receives(prefetch_receives(timeline.plan, program.rank, program.actions))
    allocations: dict[int, list[Message]] = defaultdict(list)
    for message, num_ops in early:
        route, position = message.column
        needed = max(num_ops, bisect_right(ends_us, timeline.sent_us[route][position]))
        if needed < strict[message]:
            allocations[needed].append(message)
    return allocations


def _num_ops_before_receives(actions: Iterable[Action]) -> list[tuple[Message, int]]:
    num_ops, receives = 0, []
    for action in actions:
        if action.what == "receive":
            assert action.message is not None
            receives.append((action.message, num_ops))
        num_ops += action.what == "run"
    return receives


def _releases(timeline: Timeline, program: Program) -> dict[int, list[Message]]:
    """The sent values to release, by the number of ops before the release: when the plan has their transfers ended.

    A rank without a memory limit releases them some ops later, so that a late transfer delays no op.
    """
    starts_us = timeline.starts_us[program.rank]
    late = NUM_OPS_AHEAD if timeline.plan.placement.cluster.limit_bytes[program.rank] is None else 0
    releases: dict[int, list[Message]] = defaultdict(list)
    num_ops = 0
    for action in program.actions:
        num_ops += action.what == "run"
        if action.what == "send":
            assert action.message is not None
            route, position = action.message.column
            planned = bisect_left(starts_us, timeline.arrived_us[route][position])
            releases[min(max(planned, num_ops) + late, len(starts_us))].append(action.message)
    return releases


@dataclass(slots=True)
class _Steps:
    """The steps so far, and the positions of those that later steps wait for."""

    steps: list[Step] = field(default_factory=list)
    ran: dict[Op, int] = field(default_factory=dict)
    # Lists, as a placement may have an edge twice.
    allocated: dict[Message, list[int]] = field(default_factory=dict)
    received: dict[Op, list[int]] = field(default_factory=dict)  # by the op that reads
    sent: dict[Message, list[int]] = field(default_factory=dict)
    reduced: list[int] = field(default_factory=list)

    def _add(self, step: Step) -> int:
        self.steps.append(step)
        return len(self.steps) - 1

    def allocate(self, message: Message) -> None:
        step = Step("allocate", COMPUTE, message.transfer, message=message)
        self.allocated.setdefault(message, []).append(self._add(step))

    def receive(self, message: Message) -> None:
        if not self.allocated.get(message):
            self.allocate(message)
        along = channel(message.transfer)
        waits = (self.allocated[message].pop(0),)
        step = Step("receive", str(along), message.transfer, waits, communicator=along, message=message)
        self.received.setdefault(message.transfer.target, []).append(self._add(step))

    def run(self, op: Op, ranks: tuple[int, ...]) -> None:
        waits = tuple(self.received.pop(op, ()))
        together = Communicator("stage", tuple(sorted(ranks))) if len(ranks) > 1 else None
        self.ran[op] = self._add(Step("run", COMPUTE, op, waits, communicator=together))

    def send(self, message: Message) -> None:
        along = channel(message.transfer)
        waits = (self.ran[message.transfer.source],)
        step = Step("send", str(along), message.transfer, waits, communicator=along, message=message)
        self.sent.setdefault(message, []).append(self._add(step))

    def release(self, message: Message) -> None:
        waits = (self.sent[message].pop(0),)
        self._add(Step("release", COMPUTE, message.transfer, waits, message=message))

    def reduce(self, op: Op) -> None:
        self.reduced.append(self._add(Step("reduce", REPLICAS, op, (self.ran[op],))))

    def end(self, tied: Iterable[tuple[int, ...]]) -> None:
        """Wait for the reductions; then sum the gradients of tied weights, and wait for these sums."""
        last = self._add(Step("join", COMPUTE, waits=tuple(self.reduced)))
        sums = []
        for ranks in tied:
            together = Communicator("tied", tuple(sorted(ranks)))
            sums.append(self._add(Step("sum", str(together), together.ranks, (last,), communicator=together)))
        if sums:
            self._add(Step("join", COMPUTE, waits=tuple(sums)))
