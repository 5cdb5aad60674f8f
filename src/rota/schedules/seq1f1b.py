"""Seq1F1B: 1F1B whose micro-batches are chunks of samples, forward in order and backward in reverse.

Sun et al., "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language Model Training", 2024, section
3.2: the queue between forwards and backwards gives back the earliest sample, and of that sample the last chunk.

    2 samples of 2 chunks     rank 0  F0 F1 F2 .  .  B1 B1 F3 B0 B0 …
                              rank 1  .  F0 F1 B1 B1 F2 B0 B0 F3 …
"""

from __future__ import annotations

from rota.core.errors import ScheduleError
from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.schedules.common import alternate, depth, require_microbatches


def seq1f1b(placement: Placement, num_microbatches: int) -> Plan:
    """Seq1F1B on any DAG of stages.

    A stage warms up with one forward for each stage on its longest path to the end, as in 1F1B. It adds the forwards
    that the last stage needs before its first backward: the number of chunks per sample minus one.

    Args:
        placement: At most one stage per rank; `sample_of` says which micro-batches are chunks of one sample.
        num_microbatches: Any number; each chunk is one.

    Returns:
        The plan.

    Raises:
        ScheduleError: No sample is cut, or a rank has several stages.
    """
    require_microbatches("seq1f1b", num_microbatches)
    if not placement.sample_of:
        raise ScheduleError(
            "seq1f1b: no sample is cut into chunks; give the placement sample_of, such as by "
            "placement.in_chunks(2, 8), or use 1f1b"
        )
    depths = depth(placement)
    orders = []
    for rank in range(placement.num_ranks):
        stages = placement.stages_on(rank)
        if len(stages) > 1:
            raise ScheduleError(
                f"seq1f1b: rank {rank} has the stages {', '.join(map(str, stages))}, but seq1f1b takes one stage per "
                f"rank; place one stage per rank, or search for a plan"
            )
        forwards = [m for stage in stages for m in placement.microbatches(stage, num_microbatches)]
        backwards = placement.backward_sequence(forwards)
        place = {m: i for i, m in enumerate(forwards)}
        # The k-th backward comes after k + warm-up + 1 forwards, and its own forward has to be among them.
        warmup = max((place[m] - k for k, m in enumerate(backwards)), default=0)
        warmup += depths[stages[0]] if stages else 0
        of_stage = [[(stage, m) for stage in stages for m in row] for row in (forwards, backwards)]
        orders.append(alternate(placement, of_stage[0], of_stage[1], min(warmup, len(forwards))))
    return Plan(placement, num_microbatches, tuple(orders))
