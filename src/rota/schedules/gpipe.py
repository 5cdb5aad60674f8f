"""GPipe: all forwards, then all backwards.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019, section 2.2.

    rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 B1 B1 …
    rank 1  .  F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 …
"""

from __future__ import annotations

from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.core.stopping import look
from rota.core.tasks import Kind, Op
from rota.schedules.common import backward_ops, depth, require_microbatches


def gpipe(placement: Placement, num_microbatches: int) -> Plan:
    """All forwards, then all backwards.

    Several stages on a rank run one after the other, each with all its micro-batches.

    Args:
        placement: Any.
        num_microbatches: Any number.

    Returns:
        The plan.

    Raises:
        ScheduleError: `num_microbatches` is less than 1.
    """
    require_microbatches("gpipe", num_microbatches)
    depths = depth(placement)
    orders = []
    for rank in range(placement.num_ranks):
        look()
        stages = sorted(placement.stages_on(rank), key=lambda stage: (-depths[stage], stage))
        forwards = [Op(s, Kind.F, m) for s in stages for m in placement.microbatches(s, num_microbatches)]
        backwards = [
            op
            for s in reversed(stages)
            for m in placement.backward_sequence(placement.microbatches(s, num_microbatches))
            for op in backward_ops(placement, s, m)
        ]
        orders.append(tuple(forwards + backwards))
    return Plan(placement, num_microbatches, tuple(orders))
