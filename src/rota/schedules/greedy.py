"""A list scheduler: of the ops that it could run, a free rank starts the one that comes first in an ideal schedule.

Graham, "Bounds on Multiprocessing Timing Anomalies", 1969. In the ideal schedule every op has its turn, a slot, as if
all ops took one slot. Here ops and transfers last as long as the placement says, and a forward waits until there is
memory for what it keeps.

    turns of a rank      F0  .  .  I0 F1 .  .  I1        slots
    what is run          F0 .  .  .  .  F1 F1 I0 I0 W0   F1 overtakes I0, whose gradient is late; W fills gaps
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.core.stopping import Stopped, look
from rota.core.tasks import Kind, Op, scalar
from rota.schedules.common import BACKWARD_KINDS

_WEIGHT = -1  # instead of a leg: the oldest W that was postponed
_LOOK_EVERY = 100  # times that a rank is looked at


@dataclass(frozen=True, slots=True)
class Leg:
    """A part of the path of each micro-batch, down a chain and back: kinds of one stage that run back to back."""

    rank: int
    stage: int
    kinds: tuple[Kind, ...]
    duration_us: int
    lag_us: int  #: until the next leg can start
    postpones_weight: bool
    weight_us: int  #: of the W that is postponed
    is_forward: bool


def path_through(placement: Placement, postpones_weights: bool) -> list[Leg]:
    """A chain's legs: each stage's F; then, last stage first, its (R) B, or (R) I W, or (R) I where W is postponed."""
    placement = placement.average
    forward = [(stage, (Kind.F,)) for stage in placement.stages]
    kinds_back = [kind for kind in BACKWARD_KINDS if not (postpones_weights and kind is Kind.W)]
    backward = [(s, tuple(k for k in kinds_back if (s, k) in placement.index)) for s in reversed(placement.stages)]
    lags_us: dict[tuple[int, int], int] = {}
    for route in placement.routes:
        ends = placement.tasks[route.source].stage, placement.tasks[route.target].stage
        lags_us[ends] = max(scalar(route.duration_us), lags_us.get(ends, 0))
    legs, path = [], forward + backward
    for (stage, kinds), (following, _) in zip(path, [*path[1:], path[-1]], strict=True):
        tasks = [placement.index[stage, kind] for kind in kinds]
        weight = placement.index.get((stage, Kind.W)) if postpones_weights and kinds != (Kind.F,) else None
        legs.append(
            Leg(
                rank=placement.tasks[tasks[0]].ranks[0],
                stage=stage,
                kinds=kinds,
                duration_us=sum(scalar(placement.tasks[task].duration_us) for task in tasks),
                lag_us=lags_us.get((stage, following), 0),
                postpones_weight=weight is not None,
                weight_us=0 if weight is None else scalar(placement.tasks[weight].duration_us),
                is_forward=kinds == (Kind.F,),
            )
        )
    return legs


@dataclass(slots=True)
class _Rank:
    agenda: list[tuple[int, int, int]]  #: (turn, leg, micro-batch) of all that it does, in the order of turns
    left_us: int  #: work not yet started
    num_done: int = 0  #: of the agenda; all before this one have started
    free_us: int = 0
    held: int = 0  #: forwards whose last backward has not begun
    weights: deque[tuple[Leg, int]] = field(default_factory=deque)  #: postponed, with the micro-batch
    order: list[tuple[int, tuple[Kind, ...], int]] = field(default_factory=list)  #: (stage, kinds, micro-batch) as done


class ListScheduler:
    """Moves micro-batches along `legs`, each leg in micro-batch order.

    A postponed W runs where it delays nothing else, and to free memory.

    Args:
        placement: A chain of stages.
        legs: As `path_through` makes them.
        turns: [leg][micro-batch]: slots, which rise along the path.
        slots_ahead: An op may start while another op of its rank, due up to so many slots before it, cannot.
        rank_limit: A forward starts only while all stages of its rank hold fewer micro-batches.
        stage_limits: Per stage, a forward starts only while the stage holds fewer micro-batches; default: no limit.
    """

    def __init__(
        self,
        placement: Placement,
        legs: Sequence[Leg],
        turns: Sequence[Sequence[int]],
        slots_ahead: int,
        rank_limit: int,
        stage_limits: Sequence[int] = (),
    ) -> None:
        self.placement = placement
        self.legs = legs
        self.slots_ahead = slots_ahead
        self.rank_limit = rank_limit
        self.num_microbatches = len(turns[0])
        self.stage_limits = stage_limits or [self.num_microbatches] * placement.num_stages
        self.held = [0] * placement.num_stages
        self.started = [0] * len(legs)
        self.arrivals_us: list[list[int]] = [[0] * self.num_microbatches, *([] for _ in legs[1:])]
        self.ranks = []
        for rank in range(placement.num_ranks):
            numbers = [i for i, leg in enumerate(legs) if leg.rank == rank]
            work_us = sum(legs[i].duration_us + legs[i].weight_us for i in numbers) * self.num_microbatches
            self.ranks.append(_Rank(sorted((turn, i, m) for i in numbers for m, turn in enumerate(turns[i])), work_us))

    @property
    def makespan_us(self) -> int:
        """When the last rank is done, in µs."""
        return max(rank.free_us for rank in self.ranks)

    def plan(self, sooner_than_us: int | None = None) -> Plan | None:
        """The plan; None if nothing more fits, or if the plan would last `sooner_than_us` or longer."""
        wakes = [(0, rank) for rank in range(len(self.ranks))]  # a heap: when to look at which rank
        turn = 0
        while wakes:
            if turn % _LOOK_EVERY == 0:
                look()
            turn += 1
            now_us, index = heappop(wakes)
            rank = self.ranks[index]
            leg = self._next_leg(rank, now_us) if now_us >= rank.free_us else None
            if leg is None:
                continue
            if leg == _WEIGHT:
                self._do_weight(rank, now_us)
            else:
                self._do_leg(rank, leg, now_us, wakes)
            if sooner_than_us is not None and rank.free_us + rank.left_us >= sooner_than_us:
                return None
            heappush(wakes, (rank.free_us, index))
        if min(self.started) < self.num_microbatches:
            return None
        orders = (tuple(Op(stage, kind, m) for stage, kinds, m in rank.order for kind in kinds) for rank in self.ranks)
        return Plan(self.placement, self.num_microbatches, tuple(orders))

    def _next_leg(self, rank: _Rank, now_us: int) -> int | None:
        """What to start now; None to wait."""
        agenda, started, arrivals_us = rank.agenda, self.started, self.arrivals_us
        while rank.num_done < len(agenda) and agenda[rank.num_done][2] < started[agenda[rank.num_done][1]]:
            rank.num_done += 1
        memory_needed, soon_us = False, []
        for position in range(rank.num_done, len(agenda)):
            turn, i, m = agenda[position]
            if turn > agenda[rank.num_done][0] + self.slots_ahead:
                break
            if m == started[i] and m < len(arrivals_us[i]):  # the leg before has begun, its end is known
                arrival_us = arrivals_us[i][m]
                if not self._fits(rank, self.legs[i]):
                    memory_needed |= arrival_us <= now_us
                elif arrival_us <= now_us:
                    return i
                else:
                    soon_us.append(arrival_us)
        if not rank.weights:
            return None
        end_us = now_us + rank.weights[0][0].weight_us
        return _WEIGHT if memory_needed or end_us <= min(soon_us, default=end_us) else None

    def _fits(self, rank: _Rank, leg: Leg) -> bool:
        return not leg.is_forward or (
            rank.held < self.rank_limit and self.held[leg.stage] < self.stage_limits[leg.stage]
        )

    def _do_leg(self, rank: _Rank, i: int, now_us: int, wakes: list[tuple[int, int]]) -> None:
        leg, microbatch = self.legs[i], self.started[i]
        self.started[i] += 1
        self._do(rank, leg, leg.kinds, microbatch, now_us, leg.duration_us)
        if leg.postpones_weight:
            rank.weights.append((leg, microbatch))
        else:
            self._hold(rank, leg, 1 if leg.is_forward else -1)
        if i + 1 < len(self.legs):
            self.arrivals_us[i + 1].append(rank.free_us + leg.lag_us)
            heappush(wakes, (rank.free_us + leg.lag_us, self.legs[i + 1].rank))

    def _do_weight(self, rank: _Rank, now_us: int) -> None:
        leg, microbatch = rank.weights.popleft()
        self._do(rank, leg, (Kind.W,), microbatch, now_us, leg.weight_us)
        self._hold(rank, leg, -1)

    def _do(
        self, rank: _Rank, leg: Leg, kinds: tuple[Kind, ...], microbatch: int, now_us: int, duration_us: int
    ) -> None:
        rank.order.append((leg.stage, kinds, microbatch))
        rank.free_us = now_us + duration_us
        rank.left_us -= duration_us

    def _hold(self, rank: _Rank, leg: Leg, change: int) -> None:
        rank.held += change
        self.held[leg.stage] += change


def fastest(schedulers: Iterable[ListScheduler]) -> Plan:
    """The fastest plan of those tried before a surrounding search must stop; the first scheduler must find one."""
    best: tuple[Plan, int] | None = None
    try:
        for scheduler in schedulers:
            plan = scheduler.plan(sooner_than_us=best[1] if best else None)
            if plan is not None:
                best = plan, scheduler.makespan_us
    except Stopped:
        if best is None:
            raise
    assert best is not None
    return best[0]
