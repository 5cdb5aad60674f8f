"""Inference: every micro-batch forward, in order.

GPipe without its backwards.

    rank 0  F0 F1 F2 F3
    rank 1  .  F0 F1 F2 F3
"""

from __future__ import annotations

from rota.core.errors import ScheduleError
from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.core.tasks import Kind, Op
from rota.schedules.common import depth, require_microbatches


def forward_only(placement: Placement, num_microbatches: int) -> Plan:
    """The forward of every micro-batch, in order; several stages on a rank take turns.

    Args:
        placement: F tasks only: `placement.forward_only()`.
        num_microbatches: Any number.

    Returns:
        The plan.

    Raises:
        ScheduleError: A task is not F.
    """
    require_microbatches("forward_only", num_microbatches)
    for task in placement.tasks:
        if task.kind is not Kind.F:
            raise ScheduleError(
                f"forward_only: the placement has the task {task}; give it placement.forward_only() instead"
            )
    depths = depth(placement)
    orders = []
    for rank in range(placement.num_ranks):
        stages = sorted(placement.stages_on(rank), key=lambda stage: (-depths[stage], stage))
        ops = [Op(s, Kind.F, m) for s in stages for m in placement.microbatches(s, num_microbatches)]
        orders.append(tuple(sorted(ops, key=lambda op: op.microbatch)))  # stable: stages keep their order
    return Plan(placement, num_microbatches, tuple(orders))
