"""1F1B: after a warm-up, one forward and one backward in turn, so that few micro-batches are in flight.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019, section 3.2, in the
synchronous form of Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush), 2021,
section 3.3.

    rank 0  F0 F1 .  .  B0 B0 F2 B1 B1 F3 …
    rank 1  .  F0 B0 B0 F1 B1 B1 F2 …
"""

from __future__ import annotations

from rota.errors import ScheduleError
from rota.placement import Placement
from rota.plan import Plan
from rota.schedules.common import backward_ops, depth, require_microbatches
from rota.tasks import Kind, Op


def one_f_one_b(placement: Placement, num_microbatches: int) -> Plan:
    """At most one stage a rank; any DAG of stages.

    A stage warms up with one forward for each stage on its longest way to the end. Along an edge that way shrinks
    by at least one, so with h = its length, running F of micro-batch m at 2m - h and B at 2m + h + 1 contradicts
    neither data nor orders: no DAG deadlocks.
    """
    require_microbatches("1f1b", num_microbatches)
    depths = depth(placement)
    orders: list[tuple[Op, ...]] = []
    for rank in range(placement.num_ranks):
        stages = placement.stages_on(rank)
        if len(stages) > 1:
            raise ScheduleError(
                f"1f1b: rank {rank} has the stages {', '.join(map(str, stages))}, but 1f1b takes one stage a rank; "
                f"place one stage a rank, or use gpipe"
            )
        order: list[Op] = []
        for stage in stages:
            batches = placement.microbatches(stage, num_microbatches)
            warmup = min(depths[stage], len(batches))
            order += [Op(stage, Kind.F, m) for m in batches[:warmup]]
            for i, m in enumerate(batches):
                if warmup + i < len(batches):
                    order.append(Op(stage, Kind.F, batches[warmup + i]))
                order += backward_ops(placement, stage, m)
        orders.append(tuple(order))
    return Plan(placement, num_microbatches, tuple(orders))
