"""Where the copies between ranks and their hosts go in orders of ops that compute.

without copies    F0 F1 F2 … I0 …
with copies       F0 F1 O0 F2 … L0 … I0 …    O0: the copy of what F0 saved has ended, and its memory is free
L0: memory is taken again, and the copy back begins
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.core.simulation import simulate
from rota.core.tasks import Edge, Kind, Op
from rota.core.timeline import task_changes


def without_copies(placement: Placement) -> Placement:
    """The same stages, which keep what they would offload."""
    computing = [t for t, task in enumerate(placement.tasks) if not task.kind.is_copy]
    if len(computing) == len(placement.tasks):
        return placement
    index = {t: i for i, t in enumerate(computing)}
    edges = tuple(Edge(index[a], index[b], size) for a, b, size in placement.edges if a in index and b in index)
    return replace(placement, tasks=tuple(placement.tasks[t] for t in computing), edges=edges)


def with_copies(plan: Plan, placement: Placement) -> Plan:
    """The orders of a plan without copies, with the copies of a placement that offloads.

    A copy to the host ends (O) as soon as it can, or, if its memory is needed before, in front of the op that needs it.
    A copy back begins (L) so early that it ends before the backward, if there is memory for it by then.

    Args:
        plan: A plan for `without_copies(placement)`.
        placement: The placement whose copies are added.

    Returns:
        A plan for `placement`. It may need more memory than there is, which `rota.check` refuses.

    Raises:
        PlanError: The plan's orders wait in a cycle.
    """
    if not any(task.kind.is_copy for task in placement.tasks):
        return plan
    timeline = simulate(plan)
    orders = tuple(
        _Rank(placement, rank).with_copies(*columns)
        for rank, columns in enumerate(zip(plan.orders, timeline.starts_us, timeline.ends_us, strict=True))
    )
    return replace(plan, placement=placement, orders=orders, service_orders=())


@dataclass
class _Rank:
    """The order of one rank while copies are added; times are those without copies."""

    placement: Placement
    rank: int
    order: list[Op] = field(default_factory=list)
    done: set[Op] = field(default_factory=set)  #: the forwards in it
    held_bytes: int = 0
    offloads: deque[tuple[int, Op]] = field(default_factory=deque)  #: (when its copy can have ended, O), first to last
    loads: deque[tuple[int, Op]] = field(default_factory=deque)  #: (when its copy should begin, L), first to last

    def __post_init__(self) -> None:
        placement = self.placement
        self.held_bytes = placement.static_bytes[self.rank]
        self.limit_bytes = placement.cluster.limit_bytes[self.rank]
        self.changes = task_changes(placement, self.rank)
        self.copies = placement.copies_on(self.rank)

    def with_copies(self, ops: Sequence[Op], starts_us: Sequence[int], ends_us: Sequence[int]) -> tuple[Op, ...]:
        self.loads = self._loads(ops, starts_us)
        copied_us = 0
        for op, start_us, end_us in zip(ops, starts_us, ends_us, strict=True):
            while self.offloads and self.offloads[0][0] <= start_us:
                self._offload()
            while self.loads and self._is_due(self.loads[0], op, end_us):
                self._load()
            self._makes_room(op)
            self._append(op)
            if op.kind is Kind.F and (op.stage, Kind.O) in self.copies:
                self.done.add(op)
                offload = op._replace(kind=Kind.O)
                copied_us = max(copied_us, end_us) + self._copy_us(offload)
                self.offloads.append((copied_us, offload))
                while self.offloads and self._is_shared(op):
                    self._offload()
        while self.offloads:
            self._offload()
        return tuple(self.order)

    def _loads(self, ops: Sequence[Op], starts_us: Sequence[int]) -> deque[tuple[int, Op]]:
        """All copies back, each as late as it may begin; of a shared stage before its backward."""
        loads: deque[tuple[int, Op]] = deque()
        for op, start_us in zip(reversed(ops), reversed(starts_us), strict=True):
            if op.kind in (Kind.B, Kind.I) and (op.stage, Kind.L) in self.copies:
                load = op._replace(kind=Kind.L)
                ends_us = min(start_us, loads[0][0]) if loads else start_us
                loads.appendleft((start_us if self._is_shared(op) else ends_us - self._copy_us(load), load))
        return loads

    def _is_shared(self, op: Op) -> bool:
        """Whether other ranks run the op, too: its copies must have the same place in all their orders."""
        return len(self.placement.ranks_of(op.stage)) > 1

    def _is_due(self, load: tuple[int, Op], op: Op, end_us: int) -> bool:
        """Whether a copy back begins before this op: it is for this op, or should begin by its end, and fits."""
        begin_us, (stage, _, microbatch) = load
        if op.kind in (Kind.B, Kind.I) and (op.stage, op.microbatch) == (stage, microbatch):
            return True
        return begin_us < end_us and Op(stage, Kind.F, microbatch) in self.done and self._makes_room(load[1])

    def _load(self) -> None:
        _, load = self.loads.popleft()
        while any(offload == load._replace(kind=Kind.O) for _, offload in self.offloads):
            self._offload()
        self._makes_room(load)
        self._append(load)

    def _offload(self) -> None:
        self._append(self.offloads.popleft()[1])

    def _makes_room(self, op: Op) -> bool:
        """Waits for copies to the host until there is memory for an op; whether there is."""
        if self.limit_bytes is None:
            return True
        needed_bytes = self._changes_bytes(op)[0]
        while self.offloads and self.held_bytes + needed_bytes > self.limit_bytes:
            self._offload()
        return self.held_bytes + needed_bytes <= self.limit_bytes

    def _append(self, op: Op) -> None:
        self.order.append(op)
        self.held_bytes += sum(self._changes_bytes(op))

    def _changes_bytes(self, op: Op) -> tuple[int, int]:
        """What an op takes when it starts, with what it has received, and what it frees in the end."""
        at_start, at_end = (self.placement.value(amount, op.microbatch) for amount in self.changes[op[:2]])
        task = self.placement.tasks[self.placement.index[op[:2]]]
        held, peak = (self.placement.value(amount, op.microbatch) for amount in (task.held_bytes, task.peak_bytes))
        return at_start + min(held, 0) - peak - at_end, at_end

    def _copy_us(self, op: Op) -> int:
        """How long a copy takes, in turn with those of the ranks that share the link."""
        route = self.placement.routes[self.copies[op[:2]]]
        links = [self.placement.cluster.shared[i] for i in route.shared]
        most = max((max(len(link.senders), len(link.receivers)) for link in links), default=1)
        duration_us, service_us = (
            self.placement.value(us, op.microbatch) for us in (route.duration_us, route.service_us)
        )
        return duration_us + service_us * (most - 1)
