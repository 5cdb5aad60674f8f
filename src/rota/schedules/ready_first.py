"""Ready first: 1F1B for any placement. If both are ready, a free rank starts a backward rather than a forward.

List scheduling: Graham, "Bounds on Multiprocessing Timing Anomalies", 1969. A stage starts a forward only while it
keeps fewer micro-batches than its limit. That is what 1F1B's warm-up amounts to: one, and one more for each rank that
follows. Every piece of work runs its micro-batches in order and limits are 1 or more, so the oldest micro-batch can
always go on: no deadlock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from typing import final

from rota.placement import Placement
from rota.plan import Plan
from rota.schedules.common import require_microbatches, stages_after
from rota.stopping import look
from rota.tasks import Kind, Op


def ready_first(placement: Placement, num_microbatches: int, forwards_a_hop: int = 1) -> Plan:
    """Any DAG of stages, any number of them per rank. W fills gaps, and frees memory where a forward needs it.

    Args:
        placement: Any. For a stage on several ranks, the time of the first rank counts.
        num_microbatches: Any number.
        forwards_a_hop: A stage keeps at most `1 + forwards_a_hop` × (ranks that follow on the path to the end) micro-
            batches: 0 needs least memory, 2 hides transfers.

    Returns:
        The plan.

    Raises:
        ScheduleError: `num_microbatches` is less than 1.
    """
    require_microbatches("ready_first", num_microbatches)
    return _Scheduler(placement, num_microbatches, forwards_a_hop).plan()


@dataclass(slots=True)
class _Piece:
    """Kinds of one stage that run back to back: F, (R) B, (R) I, or W."""

    stage: int
    kinds: tuple[Kind, ...]
    rank: int
    duration_us: int
    holds: int  #: change in the number of micro-batches that the stage keeps, from its start on
    microbatches: range
    following: dict[int, int] = field(default_factory=dict)  #: piece -> lag in µs
    arrivals_us: list[int] = field(default_factory=list)  #: µs, by position in `microbatches`
    missing: list[int] = field(default_factory=list)  #: by position: pieces before it that have not started
    num_started: int = 0

    @property
    def is_weight(self) -> bool:
        return self.kinds == (Kind.W,)

    @property
    def is_coming(self) -> bool:
        """Whether the time at which the next micro-batch's inputs are all available is known."""
        return self.num_started < len(self.microbatches) and not self.missing[self.num_started]

    @property
    def arrival_us(self) -> int:
        """That time, if it is known."""
        return self.arrivals_us[self.num_started]


@final
class _Scheduler:
    def __init__(self, placement: Placement, num_microbatches: int, forwards_a_hop: int) -> None:
        self.placement, self.num_microbatches = placement, num_microbatches
        self.pieces = _pieces(placement, num_microbatches)
        self.limits = {stage: 1 + forwards_a_hop * hops for stage, hops in _hops(placement).items()}
        self.held = dict.fromkeys(placement.stages, 0)
        self.free_us = [0] * placement.num_ranks
        self.orders: list[list[Op]] = [[] for _ in self.free_us]
        self.on = [[piece for piece in self.pieces if piece.rank == rank] for rank in range(placement.num_ranks)]
        self.wakes = [(0, rank) for rank in range(placement.num_ranks)]  # a heap: when to look at which rank

    def plan(self) -> Plan:
        while self.wakes:
            look()
            now_us, rank = heappop(self.wakes)
            piece = self._next(self.on[rank], now_us) if now_us >= self.free_us[rank] else None
            if piece is not None:
                self._start(piece, now_us)
        return Plan(self.placement, self.num_microbatches, tuple(map(tuple, self.orders)))

    def _next(self, pieces: list[_Piece], now_us: int) -> _Piece | None:
        """The piece that a free rank starts now; None to wait for a later one."""
        coming = [piece for piece in pieces if piece.is_coming]
        ready = [piece for piece in coming if piece.arrival_us <= now_us]
        startable = [piece for piece in ready if self._fits(piece)]
        piece = min(startable, key=self._urgency, default=None)
        if piece is None or not piece.is_weight or len(startable) < len(ready):  # W frees memory for those
            return piece
        # In a gap, W must not delay what is known to come; the rank is woken again then.
        others = (other.arrival_us for other in coming if not other.is_weight and self._fits(other))
        return piece if now_us + piece.duration_us <= min(others, default=math.inf) else None

    def _fits(self, piece: _Piece) -> bool:
        return piece.holds <= 0 or self.held[piece.stage] < self.limits[piece.stage]

    def _urgency(self, piece: _Piece) -> tuple[int, int, int]:
        first = {Kind.F: 1, Kind.W: 2}.get(piece.kinds[-1], 0)
        return first, piece.microbatches[piece.num_started], piece.stage

    def _start(self, piece: _Piece, now_us: int) -> None:
        k, end_us = piece.num_started, now_us + piece.duration_us
        piece.num_started += 1
        ops = [Op(piece.stage, kind, piece.microbatches[k]) for kind in piece.kinds]
        for rank in self.placement.ranks_of(piece.stage):
            self.orders[rank] += ops
        self.held[piece.stage] += piece.holds
        self.free_us[piece.rank] = end_us
        heappush(self.wakes, (end_us, piece.rank))
        for i, lag_us in piece.following.items():
            after = self.pieces[i]
            after.arrivals_us[k] = max(after.arrivals_us[k], end_us + lag_us)
            after.missing[k] -= 1
            heappush(self.wakes, (after.arrivals_us[k], after.rank))


def _pieces(placement: Placement, num_microbatches: int) -> list[_Piece]:
    placement = placement.average
    pieces: list[_Piece] = []
    of_task: dict[int, int] = {}
    for stage in placement.stages:
        groups = list(_groups(placement, stage))
        for kinds in groups:
            tasks = [placement.index[stage, kind] for kind in kinds]
            of_task |= dict.fromkeys(tasks, len(pieces))
            holds = len(groups) > 1 and (kinds == groups[0]) - (kinds == groups[-1])
            duration_us = sum(placement.tasks[task].duration_us for task in tasks)
            batches = placement.microbatches(stage, num_microbatches)
            pieces.append(_Piece(stage, kinds, placement.tasks[tasks[0]].ranks[0], duration_us, int(holds), batches))
    lags_us: dict[tuple[int, int], int] = {}
    for route in placement.routes:
        ends = of_task[route.source], of_task[route.target]
        lags_us[ends] = max(route.duration_us, lags_us.get(ends, 0))
    for edge in placement.edges:
        source, target = of_task[edge.source], of_task[edge.target]
        if source != target:
            pieces[source].following[target] = lags_us.get((source, target), 0)
    for piece in pieces:
        piece.arrivals_us, piece.missing = ([0] * len(piece.microbatches) for _ in range(2))
    for piece in pieces:
        for i in piece.following:
            pieces[i].missing = [count + 1 for count in pieces[i].missing]
    return pieces


def _groups(placement: Placement, stage: int) -> Iterator[tuple[Kind, ...]]:
    """The stage's pieces. R is part of its backward's: run earlier, it would hold memory without need."""
    for kinds in ((Kind.F,), (Kind.R, Kind.B, Kind.I), (Kind.W,)):
        there = tuple(kind for kind in kinds if (stage, kind) in placement.index)
        if there:
            yield there


def _hops(placement: Placement) -> dict[int, int]:
    """For each stage, how often the longest path forward to a last stage changes ranks."""
    after = stages_after(placement)
    hops: dict[int, int] = {}
    for stage in TopologicalSorter(after).static_order():  # last stages first
        crossing = [hops[t] + (placement.ranks_of(t) != placement.ranks_of(stage)) for t in after[stage]]
        hops[stage] = max(crossing, default=0)
    return hops
