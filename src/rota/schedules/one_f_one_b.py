"""1F1B: after a warm-up, one forward and one backward in turn, so that few micro-batches are in flight.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019, section 3.2, in the
synchronous form of Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush), 2021,
section 3.3. Eager 1F1B warms up with twice as many forwards, so that transfers are hidden: Zhuang et al., "On
Optimizing the Communication of Model Parallelism", 2022, section 4. Micro-batches of Seq1F1B are chunks of samples,
forward in order and backward in reverse: Sun et al., "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large
Language Model Training", 2024, section 3.2.

    1F1B      rank 0  F0 F1 .  .  B0 B0 F2 B1 B1 F3 …       Seq1F1B, 2 chunks   rank 0  F0 F1 F2 .  .  B1 B1 F3 B0 B0 …
              rank 1  .  F0 B0 B0 F1 B1 B1 F2 …                                 rank 1  .  F0 F1 B1 B1 F2 B0 B0 F3 …
"""

from __future__ import annotations

from rota.core.errors import ScheduleError
from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.schedules.common import alternate, depth, require_microbatches, require_one_stage_per_rank


def one_f_one_b(placement: Placement, num_microbatches: int) -> Plan:
    """1F1B on any DAG of stages.

    A stage warms up with one forward for each stage on its longest path to the end. Along an edge, the length h of that
    path shrinks by at least one. So F of micro-batch m at time 2m - h and B at 2m + h + 1 agree with all edges and
    orders: no DAG can deadlock.

    Args:
        placement: At most one stage per rank.
        num_microbatches: Any number.

    Raises:
        ScheduleError: A rank has several stages.
    """
    return _warmed_up("1f1b", placement, num_microbatches, forwards_a_hop=1)


def eager_one_f_one_b(placement: Placement, num_microbatches: int) -> Plan:
    """1F1B with two forwards of warm-up for each stage that follows; up to 2(p - s) - 1 micro-batches in flight.

    Args:
        placement: At most one stage per rank.
        num_microbatches: Any number.

    Raises:
        ScheduleError: A rank has several stages.
    """
    return _warmed_up("eager_1f1b", placement, num_microbatches, forwards_a_hop=2)


def seq1f1b(placement: Placement, num_microbatches: int) -> Plan:
    """Seq1F1B on any DAG of stages.

    A stage warms up with one forward for each stage on its longest path to the end, as in 1F1B. It adds the forwards
    that the last stage needs before its first backward: the number of chunks per sample minus one.

    Args:
        placement: At most one stage per rank; `sample_of` says which micro-batches are chunks of one sample.
        num_microbatches: Any number; each chunk is one.

    Raises:
        ScheduleError: No sample is cut, or a rank has several stages.
    """
    require_microbatches("seq1f1b", num_microbatches)
    if not placement.sample_of:
        raise ScheduleError(
            "seq1f1b: no sample is cut into chunks; give the placement sample_of, such as by "
            "placement.in_chunks(2, 8), or use 1f1b"
        )
    return _warmed_up("seq1f1b", placement, num_microbatches, forwards_a_hop=1, in_chunks=True)


def _warmed_up(
    name: str, placement: Placement, num_microbatches: int, forwards_a_hop: int, in_chunks: bool = False
) -> Plan:
    require_microbatches(name, num_microbatches)
    require_one_stage_per_rank(name, placement)
    depths = depth(placement)
    orders = []
    for rank in range(placement.num_ranks):
        stages = placement.stages_on(rank)
        forwards = [m for stage in stages for m in placement.microbatches(stage, num_microbatches)]
        backwards = placement.backward_sequence(forwards) if in_chunks else forwards
        position = {m: i for i, m in enumerate(forwards)}
        # The k-th backward comes after k + warm-up + 1 forwards, and its own forward has to be among them.
        warmup = max((position[m] - k for k, m in enumerate(backwards)), default=0)
        warmup += forwards_a_hop * depths[stages[0]] if stages else 0
        ahead, back = ([(stage, m) for stage in stages for m in row] for row in (forwards, backwards))
        orders.append(alternate(placement, ahead, back, min(warmup, len(forwards))))
    return Plan(placement, num_microbatches, tuple(orders))
