"""1F1B: after a warm-up, one forward and one backward in turn, so that few micro-batches are in flight.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019, section 3.2, in the
synchronous form of Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush), 2021,
section 3.3. Eager 1F1B warms up with twice as many forwards, so that transfers are hidden: Zhuang et al., "On
Optimizing the Communication of Model Parallelism", 2022, section 4.

    rank 0  F0 F1 .  .  B0 B0 F2 B1 B1 F3 …
    rank 1  .  F0 B0 B0 F1 B1 B1 F2 …
"""

from __future__ import annotations

from rota.core.errors import ScheduleError
from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.core.tasks import Op
from rota.schedules.common import alternate, depth, require_microbatches


def one_f_one_b(placement: Placement, num_microbatches: int) -> Plan:
    """1F1B on any DAG of stages.

    A stage warms up with one forward for each stage on its longest path to the end. Along an edge, the length h of that
    path shrinks by at least one. So F of micro-batch m at time 2m - h and B at 2m + h + 1 agree with all edges and
    orders: no DAG can deadlock.

    Args:
        placement: At most one stage per rank.
        num_microbatches: Any number.

    Returns:
        The plan.

    Raises:
        ScheduleError: A rank has several stages.
    """
    return _warmed_up("1f1b", placement, num_microbatches, forwards_a_hop=1)


def eager_one_f_one_b(placement: Placement, num_microbatches: int) -> Plan:
    """1F1B with two forwards of warm-up for each stage that follows; up to 2(p - s) - 1 micro-batches in flight.

    Args:
        placement: At most one stage per rank.
        num_microbatches: Any number.

    Returns:
        The plan.

    Raises:
        ScheduleError: A rank has several stages.
    """
    return _warmed_up("eager_1f1b", placement, num_microbatches, forwards_a_hop=2)


def _warmed_up(name: str, placement: Placement, num_microbatches: int, forwards_a_hop: int) -> Plan:
    require_microbatches(name, num_microbatches)
    depths = depth(placement)
    orders: list[tuple[Op, ...]] = []
    for rank in range(placement.num_ranks):
        stages = placement.stages_on(rank)
        if len(stages) > 1:
            raise ScheduleError(
                f"{name}: rank {rank} has the stages {', '.join(map(str, stages))}, but {name} takes one stage per "
                f"rank; place one stage per rank, or use interleaved_1f1b or gpipe"
            )
        batches = [(stage, m) for stage in stages for m in placement.microbatches(stage, num_microbatches)]
        warmup = forwards_a_hop * depths[stages[0]] if stages else 0
        orders.append(alternate(placement, batches, batches, min(warmup, len(batches))))
    return Plan(placement, num_microbatches, tuple(orders))
