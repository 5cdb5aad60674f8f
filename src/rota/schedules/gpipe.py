"""GPipe: all forwards, then all backwards; and inference, its forward passes only.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019, section 2.2.

    rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 B1 B1 …
    rank 1  .  F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 …
"""

from __future__ import annotations

from rota.core.errors import ScheduleError
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


def forward_only(placement: Placement, num_microbatches: int) -> Plan:
    """The forward of every micro-batch, in order; several stages on a rank take turns.

    Args:
        placement: F tasks only: `placement.forward_only()`.
        num_microbatches: Any number.

    Raises:
        ScheduleError: A task is not F.
    """
    require_microbatches("forward_only", num_microbatches)
    for task in placement.tasks:
        if task.kind is not Kind.F:
            raise ScheduleError(
                f"forward_only: the placement has the task {task}; give it placement.forward_only() instead"
            )
    orders = gpipe(placement, num_microbatches).orders
    by_microbatch = (tuple(sorted(order, key=lambda op: op.microbatch)) for order in orders)  # stages keep their order
    return Plan(placement, num_microbatches, tuple(by_microbatch))
