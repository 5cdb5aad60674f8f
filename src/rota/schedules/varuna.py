"""Varuna: activations are recomputed just in time for the gradient, and whatever frees memory goes first.

Athlur et al., "Varuna: Scalable, Low-cost Training of Massive Deep Learning Models", EuroSys 2022, section 3.2. In
ticks of F = R = 1 and B = 2, a rank runs the first of these that is ready: second half of a backward, backward,
recompute, forward. A recompute becomes ready when the next stage is half through its backward, so it ends when the
gradient arrives.

    rank 0  F0 F1 F2 .  .  R0 B0 B0 F3 R1 B1 B1 …
    rank 1  .  F0 F1 .  R0 B0 B0 ...
    rank 2  .  .  F0 B0 B0 F1 B1 B1 …
"""

from __future__ import annotations

from collections import deque

from rota.core.errors import ScheduleError
from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.core.tasks import Kind, Op
from rota.schedules.common import require_chain_on, require_microbatches

_FIRST_TO_LAST = (Kind.B, Kind.R, Kind.F)


def varuna(placement: Placement, num_microbatches: int) -> Plan:
    """One stage per rank; all stages but the last recompute.

    Args:
        placement: A chain with one stage per rank, of costs with `recompute_us=(…, None)` and no `weight_us`.
        num_microbatches: Any number.

    Raises:
        ScheduleError: The placement is not such a chain.
    """
    require_microbatches("varuna", num_microbatches)
    p = placement.num_ranks
    require_chain_on("varuna", placement, range(p), "rota.place(costs, cluster)")
    for stage in range(p):
        needed = {Kind.F, Kind.B} if stage == p - 1 else {Kind.F, Kind.R, Kind.B}
        kinds = {task.kind for task in placement.tasks if task.stage == stage}
        if kinds != needed:
            raise ScheduleError(
                f"varuna: stage {stage} has {' '.join(sorted(kinds))}, but needs {' '.join(sorted(needed))}; give the "
                f"costs recompute_us with None for the last stage, and no weight_us"
            )
    return Plan(placement, num_microbatches, _orders_by_ticks(p, num_microbatches))


def _orders_by_ticks(num_stages: int, num_microbatches: int) -> tuple[tuple[Op, ...], ...]:
    waiting: list[dict[Kind, deque[int]]] = [{kind: deque() for kind in _FIRST_TO_LAST} for _ in range(num_stages)]
    waiting[0][Kind.F].extend(range(num_microbatches))
    half_done: list[int | None] = [None] * num_stages  # the micro-batch whose backward runs its second tick
    orders: list[list[Op]] = [[] for _ in range(num_stages)]
    while any(m is not None for m in half_done) or any(queue for stage in waiting for queue in stage.values()):
        ended: list[tuple[int, Kind, int]] = []  # what becomes ready in this tick can start in the next one
        for stage in range(num_stages):
            if half_done[stage] is not None:
                half_done[stage] = None
                continue
            kind = next((kind for kind in _FIRST_TO_LAST if waiting[stage][kind]), None)
            if kind is not None:
                m = waiting[stage][kind].popleft()
                orders[stage].append(Op(stage, kind, m))
                ended.append((stage, kind, m))
        for stage, kind, m in ended:
            last = stage == num_stages - 1
            if kind is Kind.F and not last:
                waiting[stage + 1][Kind.F].append(m)
            elif kind is Kind.B:
                half_done[stage] = m
                if stage > 0:
                    waiting[stage - 1][Kind.R].append(m)
            else:
                waiting[stage][Kind.B].append(m)
    return tuple(tuple(order) for order in orders)
