"""Chimera: two 1F1B pipelines in opposite directions, each of which fills the other one's bubbles.

Li and Hoefler, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional Pipelines", 2021, section
3.1; with more micro-batches than ranks, units of as many as there are ranks follow each other, section 3.5. Even
numbers go down the ranks, odd ones up. In slots of equal length:

    rank 0   F0 .  F2 F1 B1 F3 B3 B0 .  B2        F of the k-th micro-batch of a unit on stage s: slot s + 2k,
    rank 1   .  F0 F1 F2 F3 B1 B0 B3 B2 .         B: slot 2p - 1 - s + 2k, the next unit 2p slots later.
    rank 2   .  F1 F0 F3 F2 B0 B1 B2 B3 .         On a rank with an even number the first chain has F in even slots
    rank 3   F1 .  F3 F0 B0 F2 B2 B1 .  B3        and B in odd ones, the second one the other way round.
"""

from __future__ import annotations

from rota.placement import Placement
from rota.plan import Plan
from rota.schedules.common import backward_ops
from rota.schedules.dualpipe import require_bidirectional
from rota.tasks import Kind, Op


def chimera(placement: Placement, num_microbatches: int) -> Plan:
    """Two chains in opposite directions (`rota.bidirectional`), an even number of ranks and of micro-batches.

    With a split backward W follows I at once. What is left over after the units of p micro-batches makes a smaller one.
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
