"""Hanayo: the chain runs down the ranks and back up in waves, each of which fills and drains the pipeline faster.

Liu, Cheng, Zhou and You, "Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model Training
Efficiency", 2023, section 3. It is Chimera without a second copy of the weights: one wave over p ranks is one half of
two chains over 2p.

    2 waves, 2 ranks, 2 micro-batches   rank 0   0F0 0F1 .   3F0 4F0 3F1 4F1 7F0 7B0 7F1 7B1 4B0 3B0 4B1 3B1 0B0 .   0B1
                                        rank 1   .   1F0 2F0 1F1 2F1 5F0 6F0 5F1 6F1 6B0 5B0 6B1 5B1 2B0 1B0 2B1 1B1 .

In steps of one F and one B, for the k-th micro-batch of a unit of p, and S stages: F of stage s is in step s + 2k, B in
step 2(S - 1) - s + 2k, and the next unit S steps later. So no rank has two F or two B in one step: of its stages the
even ones have the even steps, p of them for each stage in turn, and the odd ones the odd steps.
"""

from __future__ import annotations

from collections.abc import Iterator

from rota.core.errors import ScheduleError
from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.schedules.common import backward_ops, num_rounds, require_chain_on, require_microbatches
from rota.schedules.greedy import ListScheduler, fastest, path_through

_SHAPE = "rota.wave(costs, cluster)"


def hanayo(placement: Placement, num_microbatches: int) -> Plan:
    """Waves in which a rank keeps the activations of at most p micro-batches, as in 1F1B. W runs right after I.

    Rota tries several ways to handle a last unit that is not full, and to let ops overtake late ones, and takes the
    fastest plan.

    Args:
        placement: `rota.wave` with 2w stages per rank.
        num_microbatches: Any number.

    Raises:
        ScheduleError: The placement is not made of whole waves, or has no backward.
    """
    name = "hanayo"
    require_microbatches(name, num_microbatches)
    p = placement.num_ranks
    waves = num_rounds(name, placement, 2 * p, _SHAPE)
    require_chain_on(name, placement, [*range(p), *reversed(range(p))] * waves, _SHAPE)
    if not all(backward_ops(placement, stage, 0) for stage in placement.stages):
        raise ScheduleError(f"{name}: the placement has no backward; use forward_only")
    return fastest(_schedulers(placement, num_microbatches))


def _schedulers(placement: Placement, num_microbatches: int) -> Iterator[ListScheduler]:
    """Schedulers to try; the first keeps to the turns, in which no rank exceeds its memory limit."""
    p, num_stages = placement.num_ranks, placement.num_stages
    legs = path_through(placement, postpones_weights=False)
    left_over = num_microbatches % p or p
    for first_unit, steps_ahead in ((p, 0), (p, 1), (left_over, num_stages // 2), (left_over, num_stages)):
        turns = _turns(p, num_stages, num_microbatches, first_unit)
        yield ListScheduler(placement, legs, turns, 2 * steps_ahead, rank_limit=num_stages)


def _turns(p: int, num_stages: int, num_microbatches: int, first_unit: int) -> list[list[int]]:
    """[leg][micro-batch], in half steps: legs are F of stage 0, 1, …, then B of …, 1, 0; F is a step's first half."""
    starts = []
    for m in range(num_microbatches):
        unit, k = divmod(m + p - first_unit, p)
        starts.append(num_stages * unit + 2 * (k if unit else m))
    steps = [*range(num_stages), *range(num_stages - 1, 2 * num_stages - 1)]
    return [[2 * (step + start) + (leg >= num_stages) for start in starts] for leg, step in enumerate(steps)]
