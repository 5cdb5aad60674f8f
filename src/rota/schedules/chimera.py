"""Chimera: two 1F1B pipelines in opposite directions, each in the bubbles of the other.

Li and Hoefler, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional Pipelines", 2021, section
3.1. With more micro-batches than ranks, units of one micro-batch per rank follow each other: section 3.5, direct
concatenation. Even micro-batches go down the ranks, odd ones up.

    4 ranks, 6 micro-batches: a unit of 4 and one of 2, whose forwards are in the bubbles of the first.

    rank 0   F0 F2 .  F1 B1 F3 B3 B0 F4 B2 .  F5 B5 .  .  B4
    rank 1   .  F0 F1 F2 F3 B1 B0 B3 B2 F4 F5 .  .  B5 B4 .
    rank 2   .  F1 F0 F3 F2 B0 B1 B2 B3 F5 F4 .  .  B4 B5 .
    rank 3   F1 F3 .  F0 B0 F2 B2 B1 F5 B3 .  F4 B4 .  .  B5

In slots: F of a direction's k-th micro-batch of a unit on stage s is in slot s + 2k, B in slot 2p - 1 - s + 2k, and the
next unit 2p slots later. On even ranks even slots are for F down, then B up, and odd ones for F up, then B down.
"""

from __future__ import annotations

from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.core.tasks import Kind, Op
from rota.schedules.common import backward_ops
from rota.schedules.dualpipe import require_bidirectional


def chimera(placement: Placement, num_microbatches: int) -> Plan:
    """Two chains in opposite directions. If the backward is split, W runs right after I.

    Args:
        placement: Made by `rota.bidirectional`, on an even number of ranks.
        num_microbatches: An even number; the last unit may be smaller.

    Raises:
        ScheduleError: The placement or the number of micro-batches does not fit.
    """
    require_bidirectional("chimera", placement, num_microbatches)
    p = placement.num_ranks
    orders = []
    for rank in range(p):
        slots: list[tuple[int, list[Op]]] = []
        for stage in placement.stages_on(rank):
            for k, m in enumerate(placement.microbatches(stage, num_microbatches)):
                unit, place = divmod(k, p // 2)
                start = 2 * (p * unit + place)
                slots.append((start + stage % p, [Op(stage, Kind.F, m)]))
                slots.append((start + 2 * p - 1 - stage % p, backward_ops(placement, stage, m)))
        orders.append(tuple(op for _, ops in sorted(slots) for op in ops))
    return Plan(placement, num_microbatches, tuple(orders))
