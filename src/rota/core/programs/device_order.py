"""The proof that kernels cannot wait in a cycle: everything that all ranks enqueue in a step, as one graph.

A kernel waits for

- the kernel before it on its stream (stream order);
- the kernels whose events its stream waits for;
- the other side: a send and its receive are one node, and so are the parts of a collective (rendezvous);
- the kernel before it on its device, as some devices run kernels in the order of their launch only.

It does not wait for room on its device, if there is room for a kernel of each stream (`occupancy`).

In `Plan.wire_order` all of these point backwards, so there is no cycle. This module does not rely on that argument: it
builds the graph from the lists that the runtime executes, and sorts it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate, pairwise, zip_longest
from typing import NamedTuple

from rota.core.errors import PlanError
from rota.core.plan import Plan
from rota.core.programs.device_steps import Communicator, DeviceProgram, device_programs
from rota.core.tasks import Transfer
from rota.core.text import count_text

_MAX_WAITS = 12  # of a cycle in an error message
_MAX_BETWEEN = 3  # kernels of a wait


@dataclass(frozen=True, slots=True)
class DeviceOrder:
    """What was proved.

    Attributes:
        num_ranks: Number of ranks.
        num_kernels: Number of kernels that all ranks enqueue in a step: one per op, send, receive and collective.
        num_channels: Number of directed pairs of ranks that send to each other, each with a communicator.
        num_collectives: Number of operations of several ranks, such as ops of tensor-parallel stages.
        num_slots: The most kernels that can be on one device at once. With room for so many, the order in which it
            serves its streams cannot make the step hang either.
    """

    num_ranks: int
    num_kernels: int
    num_channels: int
    num_collectives: int
    num_slots: int

    def __str__(self) -> str:
        """One line."""
        return f"DeviceOrder of {count_text(self.num_ranks, 'rank')}: {self.num_kernels:,} kernels wait in no cycle"


def check_device_order(plan: Plan, *, tied: Iterable[tuple[int, ...]] = ()) -> DeviceOrder:
    """Prove that a step cannot hang on devices with streams, where the host enqueues `Plan.wire_order`.

    This holds even if each send waits for its receive, and if a device runs kernels only in the order of their launch.
    Gradients of replicas are reduced after the last gradient of each stage. See `docs/accelerators.md`.

    Args:
        plan: The plan; `rota.check` must accept it.
        tied: The ranks of each group of tied weights, in the order of their sums at the end of the step.

    Returns:
        What was proved.

    Raises:
        PlanError: The plan is incomplete or out of order, or kernels would wait in a cycle (reason "device order").
    """
    return prove(device_programs(plan, tied=tied))


def prove(programs: Sequence[DeviceProgram], *, serial: bool = True) -> DeviceOrder:
    """As `check_device_order`, for any lists. `serial`: a device runs kernels only in the order of their launch.

    Raises PlanError with reason "device order" where a wait is for a later step, where two sides of a communicator
    enqueue in different orders, or where kernels wait in a cycle.
    """
    _refuse_waits_for_later_steps(programs)
    meetings = _meetings(programs)
    for communicator, sides in meetings.items():
        _refuse_different_orders(communicator, sides, programs)
    graph = _Graph(programs, meetings, serial)
    graph.refuse_cycles()
    return DeviceOrder(
        len(programs),
        sum(step.has_kernel for program in programs for step in program.steps),
        sum(communicator.use == "channel" for communicator in meetings),
        sum(
            len(next(iter(sides.values()))) for communicator, sides in meetings.items() if communicator.use != "channel"
        ),
        max(len({step.stream for step in program.steps if step.has_kernel}) for program in programs),
    )


# --- both sides of a communicator -------------------------------------------------------------------------------------

#: By communicator, and by rank: the positions of the steps on it.
Meetings = dict[Communicator, dict[int, list[int]]]


def _refuse_waits_for_later_steps(programs: Iterable[DeviceProgram]) -> None:
    for program in programs:
        for i, step in enumerate(program.steps):
            for before in step.waits:
                if before >= i:
                    raise _refusal(
                        f"rank {program.rank}: {step} waits for the event of {program.steps[before]}, which is "
                        f"enqueued later; a device does not wait for an event that is not recorded yet, so {step} "
                        f"would run too early"
                    )


def _meetings(programs: Iterable[DeviceProgram]) -> Meetings:
    meetings: Meetings = {}
    for program in programs:
        for i, step in enumerate(program.steps):
            if step.communicator is not None:
                sides = meetings.setdefault(step.communicator, {rank: [] for rank in step.communicator.ranks})
                sides[program.rank].append(i)
    return meetings


def _refuse_different_orders(
    communicator: Communicator, sides: dict[int, list[int]], programs: Sequence[DeviceProgram]
) -> None:
    (first, expected), *others = (
        (rank, [programs[rank].steps[i] for i in positions]) for rank, positions in sides.items()
    )
    for rank, steps in others:
        for number, (a, b) in enumerate(zip_longest(expected, steps), 1):
            if a is None or b is None or a.subject != b.subject:
                raise _refusal(
                    f"{communicator}: operation {number} is {a or 'none'} on rank {first}, but {b or 'none'} on rank "
                    f"{rank}; both sides of a communicator must enqueue in the same order"
                )


def _refusal(message: str) -> PlanError:
    return PlanError(message, "device order")


# --- the graph --------------------------------------------------------------------------------------------------------


class _Wait(NamedTuple):
    """On `rank`, step `i` waits for the step `before`."""

    rank: int
    i: int
    before: int


class _Graph:
    """Nodes are steps; those that meet on a communicator are one node."""

    def __init__(self, programs: Sequence[DeviceProgram], meetings: Meetings, serial: bool) -> None:
        self._programs, self._serial = programs, serial
        firsts = accumulate((len(program.steps) for program in programs), initial=0)
        self._node = [[*range(first, end)] for first, end in pairwise(firsts)]
        self._meeting: set[int] = set()
        for sides in meetings.values():
            for together in zip(*([(rank, i) for i in positions] for rank, positions in sides.items()), strict=True):
                node = min(self._node[rank][i] for rank, i in together)
                self._meeting.add(node)
                for rank, i in together:
                    self._node[rank][i] = node

    def _waits(self) -> Iterator[_Wait]:
        for rank, program in enumerate(self._programs):
            last: dict[str, int] = {}
            for i, step in enumerate(program.steps):
                for before in step.waits:
                    yield _Wait(rank, i, before)
                if step.stream in last:
                    yield _Wait(rank, i, last[step.stream])
                last[step.stream] = i
                if self._serial and i:
                    yield _Wait(rank, i, i - 1)

    def refuse_cycles(self) -> None:
        """Raise PlanError if nodes wait in a cycle."""
        waits: dict[int, list[int]] = defaultdict(list)
        for rank, i, before in self._waits():
            node = self._node[rank]
            waits[node[i]].append(node[before])
        try:
            TopologicalSorter(waits).prepare()
        except CycleError as error:
            on_cycle = next(node for node in error.args[1] if node in self._meeting)
            raise _refusal(self._describe(self._shortest_cycle(on_cycle))) from None

    def _shortest_cycle(self, start: int) -> list[_Wait]:
        """The waits of a cycle through a node that is on one, over as few messages and collectives as possible."""
        waits: dict[int, list[_Wait]] = defaultdict(list)
        for wait in self._waits():
            waits[self._node[wait.rank][wait.i]].append(wait)
        came: dict[int, _Wait] = {}
        queue = deque([start])
        while start not in came:
            node = queue.popleft()
            for wait in waits[node]:
                before = self._node[wait.rank][wait.before]
                if before not in came:
                    came[before] = wait
                    (queue.append if before in self._meeting else queue.appendleft)(before)
        chain: list[_Wait] = []
        node = start
        while not chain or node != start:
            chain.append(came[node])
            node = self._node[chain[-1].rank][chain[-1].i]
        return chain[::-1]

    def _describe(self, chain: Iterable[_Wait]) -> str:
        """One line for each message and collective of a cycle."""
        lines: list[str] = []
        between: list[_Wait] = []
        for wait in chain:
            between.append(wait)
            if self._node[wait.rank][wait.before] in self._meeting:
                lines.append(self._line(between))
                between = []
        half, more = _MAX_WAITS // 2, len(lines) - _MAX_WAITS
        if more > 0:
            lines[half:-half] = [f"… {more} more waits …"]
        device = " on a device that runs kernels in the order of their launch" if self._serial else ""
        return f"kernels would wait in a cycle{device}: {'; '.join(lines)}"

    def _line(self, between: Sequence[_Wait]) -> str:
        """Waits on one rank, from a kernel that meets others to the next one."""
        rank, last = between[0].rank, between[-1].before
        steps = self._programs[rank].steps
        kernels = [str(steps[wait.before]) for wait in between[:-1] if steps[wait.before].has_kernel]
        way = (
            f" (by way of {', '.join(kernels[:_MAX_BETWEEN])}{' …' * (len(kernels) > _MAX_BETWEEN)})" if kernels else ""
        )
        meets, subject = steps[last].communicator, steps[last].subject
        others = ", ".join(str(other) for other in meets.ranks if other != rank) if meets else ""
        part = "part"
        if isinstance(subject, Transfer):
            part = "receive" if rank == subject.sender else "send"
        return (
            f"rank {rank}: {steps[between[0].i]} waits for {steps[last]}{way}, which needs the {part} of rank {others}"
        )
