"""Zero bubble found by search: under a memory limit, for any costs of the stages and transfers.

Qi, Wan, Huang and Lin, "Zero Bubble Pipeline Parallelism", 2023, section 3, state the problem: a chain of stages, one
per rank, F, I and W each in micro-batch order, and the shortest span (longest busy window of a rank) that memory
allows. Here orders are built under many policies, zb_h1, zb_h2 and 1F1B are candidates too, and the best is improved
along its critical path until it meets a lower bound or the moves are used up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from random import Random

from rota.errors import ScheduleError
from rota.placement import Placement
from rota.plan import Plan
from rota.schedules.common import require_chain_on, require_microbatches, require_split
from rota.schedules.one_f_one_b import one_f_one_b
from rota.schedules.zero_bubble import zb_h1, zb_h2
from rota.schedules.zero_bubble_pipe import (
    FORWARD,
    INPUT,
    NEVER,
    WEIGHT,
    Orders,
    Pipe,
    Policy,
    Timing,
    build,
    time_orders,
)
from rota.simulation import simulate
from rota.stopping import Stopped
from rota.tasks import Kind, Op
from rota.units import size_text

_KINDS = {Kind.F: FORWARD, Kind.I: INPUT, Kind.W: WEIGHT}
_HEAT = 0.002  # by what fraction a move may readily lengthen the span at first
_MOVED_OPS = 1_200_000  # length of an improvement: moves tried times ops of the plan
_STARTS = 3  # how many orders are improved
_MOST_RESERVES = 20  # how often to guess the memory reserved for transfers

Score = tuple[int, int]


def zb_auto(placement: Placement, num_microbatches: int) -> Plan:
    """A search for the shortest span; of equal spans, the shortest makespan wins.

    The span is no longer than that of zb_h1, zb_h2 and 1f1b where these fit, and memory stays within
    `placement.cluster.limit_bytes`. When a surrounding search must stop, the result is the best plan found so far.

    Args:
        placement: A chain with one stage per rank (`rota.place`) and a split backward.
        num_microbatches: Any number.

    Returns:
        The plan.

    Raises:
        ScheduleError: The placement is not such a chain, its micro-batches differ, or nothing fits in the memory
            limit.
    """
    name, shape = "zb_auto", "rota.place(costs, cluster)"
    require_microbatches(name, num_microbatches)
    require_chain_on(name, placement, range(placement.num_ranks), shape)
    require_split(name, placement)
    if not placement.is_alike:
        raise ScheduleError(f"{name}: plans micro-batches that are all alike; use zb_h1, or search for a plan")
    search = _Search(placement, num_microbatches)
    one_at_a_time = [bytearray((FORWARD, INPUT, WEIGHT)) * num_microbatches for _ in range(placement.num_ranks)]
    by_hand = [schedule(placement, num_microbatches) for schedule in (zb_h1, zb_h2, one_f_one_b)]
    for orders in (one_at_a_time, *(_letters(plan) for plan in by_hand)):
        search.offer(orders)
    try:
        search.reserve_buffers()
        search.try_policies()
        if search.best is None:
            raise _nothing_fits(_plan(placement, num_microbatches, one_at_a_time))
        search.improve_all()
    except Stopped:
        if search.best is None:
            raise
    found = _plan(placement, num_microbatches, search.best)
    return _as_simulated(found, by_hand) if placement.cluster.shared else found


def _as_simulated(found: Plan, others: Sequence[Plan]) -> Plan:
    """The best of the plans that fit: the search does not know that transfers wait for shared links."""
    limits = found.placement.cluster.limit_bytes
    simulated = [
        timeline
        for timeline in map(simulate, (found, *others))
        if all(limit is None or most <= limit for most, limit in zip(timeline.peak_memory_bytes, limits, strict=True))
    ]
    return min(simulated, key=lambda timeline: (timeline.span_us, timeline.makespan_us)).plan


class _Search:
    """The best orders so far, and how to improve them."""

    def __init__(self, placement: Placement, num_microbatches: int) -> None:
        self.placement = placement
        self.pipe = _pipe(placement, num_microbatches)
        self.least_span_us = self.pipe.least_span_us()
        self.has_buffers = any(route.num_bytes for route in placement.routes)
        self.best: Orders | None = None
        self.best_score: Score = (NEVER, NEVER)
        self.found: dict[Score, Orders] = {}

    @property
    def is_done(self) -> bool:
        return self.best_score[0] <= self.least_span_us

    def offer(self, orders: Orders) -> None:
        """Takes the orders if they are better, and fit."""
        fitted = [order for r, letters in enumerate(orders) if (order := self.pipe.fitted(r, letters)) is not None]
        timing = time_orders(self.pipe, fitted) if len(fitted) == len(orders) else None
        if timing is not None:
            self.take(fitted, timing)

    def take(self, orders: Orders, timing: Timing) -> None:
        if timing.score < self.best_score and not any(self.overflow(orders)):
            self.best, self.best_score = orders, timing.score

    def overflow(self, orders: Orders) -> list[int]:
        """[num_ranks]: bytes over the limit, including those that transfers hold, which the pipe does not count."""
        if not self.has_buffers:
            return [0] * len(orders)
        plan = _plan(self.placement, self.pipe.num_microbatches, orders)
        limits = self.placement.cluster.limit_bytes
        return [0 if limit is None else max(0, peak - limit) for peak, limit in zip(_peaks(plan), limits, strict=True)]

    def reserve_buffers(self) -> None:
        """Reduces the headroom until the first policy's orders fit with what transfers hold."""
        for _ in range(_MOST_RESERVES if self.has_buffers else 0):
            orders = build(self.pipe, next(self.policies(self.least_span_us)))
            over = self.overflow(orders) if orders else []
            if not any(over):
                break
            headroom = (left - more for left, more in zip(self.pipe.headroom_bytes, over, strict=True))
            self.pipe = replace(self.pipe, headroom_bytes=tuple(headroom))

    def try_policies(self) -> None:
        """Aims at the least possible span, then at some between that and the best found."""
        least = self.least_span_us
        for eighths in (0, 1, 2, 4):
            aim = least + eighths * (min(self.best_score[0], 2 * least) - least) // 8
            for policy in self.policies(aim):
                orders = build(self.pipe, policy)
                timing = time_orders(self.pipe, orders) if orders else None
                if orders and timing:
                    self.found.setdefault(timing.score, orders)
                    self.take(orders, timing)
            if self.is_done:
                break

    def policies(self, span_us: int) -> Iterator[Policy]:
        """Caps are forwards that fill a part of the round trip; spacings are what a rank may do per micro-batch."""
        pipe = self.pipe
        forward, back, weight = (max(times) for times in zip(*pipe.times_us, strict=True))
        spacings = (back, back + weight, forward + back, forward + back + weight)
        for quarters, spacing, urgent_first in product((4, 2, 3), spacings, (False, True)):
            trips = zip(pipe.round_trips_us, pipe.times_us, strict=True)
            caps = tuple(1 + quarters * trip // (4 * max(times[FORWARD], 1)) for trip, times in trips)
            yield Policy(caps, span_us, spacing, urgent_first)

    def improve_all(self) -> None:
        """Improves the best of all, and the next best ones that policies made."""
        assert self.best is not None
        others = [self.found[score] for score in sorted(self.found) if score != self.best_score]
        for orders in (self.best, *others[: _STARTS - 1]):
            self.improve(orders)

    def improve(self, orders: Orders) -> None:
        """Simulated annealing (Kirkpatrick et al., 1983): moves ops of the critical path, worse ones less and less."""
        random = Random(0).random
        timing = time_orders(self.pipe, orders)
        assert timing is not None
        blocks = _critical_blocks(orders, timing)
        num_moves = min(max(_MOVED_OPS // sum(map(len, orders)), 1_000), 10_000)
        for n in range(num_moves):
            if self.is_done:
                break
            moved = self._move(orders, blocks, random)
            found = time_orders(self.pipe, moved) if moved else None
            if moved is None or found is None:
                continue
            worse, heat = found.score[0] - timing.score[0], _HEAT * timing.score[0] * (1 - n / num_moves)
            if worse <= 0 or random() < math.exp(-worse / heat):
                orders, timing, blocks = moved, found, _critical_blocks(moved, found)
                self.take(orders, timing)

    def _move(self, orders: Orders, blocks: list[tuple[int, int, int]], random: Callable[[], float]) -> Orders | None:
        """Moves an op of a block to the next place, or before or after the block. None if nothing changes or fits."""
        r, first, end = blocks[int(random() * len(blocks))]
        at = first + int(random() * (end - first))
        where, further = int(random() * 3), int(random() * 3)
        to = (at + 1, first - further, end - 1 + further)[where]
        order = bytearray(orders[r])
        order.insert(min(max(to, 0), len(order) - 1), order.pop(at))
        fitted = self.pipe.fitted(r, order) if order != orders[r] else None
        return None if fitted is None else [*orders[:r], fitted, *orders[r + 1 :]]


def _critical_blocks(orders: Orders, timing: Timing) -> list[tuple[int, int, int]]:
    """(rank, first, end): the ops, each block without a gap, that made the longest busy window as long as it is."""
    blocks = []
    r = timing.windows_us.index(timing.score[0])
    at = len(orders[r]) - 1
    while True:
        order, starts, times, end = orders[r], timing.starts_us[r], timing.pipe.times_us[r], at + 1
        while at and starts[at - 1] + times[order[at - 1]] == starts[at]:
            at -= 1
        blocks.append((r, at, end))
        if at == 0 and r == 0:
            return blocks
        kind, before = order[at], order.count(order[at], 0, at)  # it waited for the same op of a neighbour
        r += 1 if kind == INPUT else -1
        at = -1
        for _ in range(before + 1):
            at = orders[r].find(kind, at + 1)


def _pipe(placement: Placement, num_microbatches: int) -> Pipe:
    """The placement as a pipe. R, where a stage has it, counts as a part of I, because it runs right before I."""
    index = placement.index
    times, needs, keeps, again = [], [], [], []
    for stage in placement.stages:
        f, i, w = (placement.tasks[index[stage, kind]] for kind in (Kind.F, Kind.I, Kind.W))
        f_us, i_us, w_us = (placement.tasks[index[stage, kind]].duration_us for kind in (Kind.F, Kind.I, Kind.W))
        r = placement.task(stage, Kind.R)
        again_us = placement.tasks[index[stage, Kind.R]].duration_us if r else 0
        held, peak = (r.held_bytes, max(r.held_bytes, 0) + r.peak_bytes) if r else (0, 0)
        need = max(peak, held + max(i.held_bytes, 0) + i.peak_bytes)
        again.append(again_us)
        times.append((f_us, again_us + i_us, w_us))
        needs.append((max(f.held_bytes, 0) + f.peak_bytes, need, max(w.held_bytes, 0) + w.peak_bytes))
        keeps.append((f.held_bytes, held + i.held_bytes, w.held_bytes))
    lags = {(route.source, route.target): route.duration_us for route in placement.routes}
    down = [lags[index[r - 1, Kind.F], index[r, Kind.F]] for r in placement.stages[1:]]
    up = [lags.get((index[r + 1, Kind.I], index[r, Kind.I]), 0) - again[r] for r in placement.stages[:-1]]
    limits = zip(placement.cluster.limit_bytes, placement.static_bytes, strict=True)
    headroom = tuple(NEVER if limit is None else limit - static for limit, static in limits)
    return Pipe(num_microbatches, tuple(times), (0, *down), (*up, 0), headroom, tuple(needs), tuple(keeps))


def _letters(plan: Plan) -> Orders:
    return [bytearray(_KINDS[op.kind] for op in order if op.kind in _KINDS) for order in plan.orders]


def _plan(placement: Placement, num_microbatches: int, orders: Orders) -> Plan:
    plan = []
    for stage, order in enumerate(orders):
        inputs = [kind for kind in (Kind.R, Kind.I) if (stage, kind) in placement.index]
        kinds = ([Kind.F], inputs, [Kind.W])
        microbatches = [iter(range(num_microbatches)) for _ in kinds]
        ops: list[Op] = []
        for letter in order:
            microbatch = next(microbatches[letter])
            ops += [Op(stage, kind, microbatch) for kind in kinds[letter]]
        plan.append(tuple(ops))
    return Plan(placement, num_microbatches, tuple(plan))


def _peaks(plan: Plan) -> tuple[int, ...]:
    """The most bytes that each rank holds at any time, as `rota.check` counts."""
    return simulate(plan).peak_memory_bytes


def _nothing_fits(least: Plan) -> ScheduleError:
    limits, static = least.placement.cluster.limit_bytes, least.placement.static_bytes
    peaks = enumerate(zip(_peaks(least), limits, strict=True))
    _, rank, peak, limit = max((peak - limit, rank, peak, limit) for rank, (peak, limit) in peaks if limit is not None)
    return ScheduleError(
        f"zb_auto: rank {rank} holds {size_text(peak)} ({peak} bytes) even with one micro-batch at a time, "
        f"{size_text(static[rank])} of it always (parameters, gradients, optimizer), over its limit of "
        f"{size_text(limit)} ({limit} bytes); raise it, make micro-batches smaller, or give the rank fewer layers"
    )
