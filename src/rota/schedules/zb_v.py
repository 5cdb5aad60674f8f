"""ZB-V: two stages per rank in a V, so that W can fill all bubbles in the memory of 1F1B.

Qi, Wan, Huang and Lin, "Zero Bubble Pipeline Parallelism", 2023, section 6. The chain runs down the ranks and back up.
The rank that a micro-batch enters first is the one that it leaves last, and both its backwards start early.

    2 ranks, 4 micro-batches, all ops equally long: no rank ever waits from its first op to its last.

    rank 0   0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
    rank 1   .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.core.tasks import Kind, Op
from rota.schedules.common import backward_ops, require_chain_on, require_microbatches, require_split

_SHAPE = "rota.wave(costs, cluster), with two stages per rank"


def zb_v(placement: Placement, num_microbatches: int) -> Plan:
    """ZB-V in PyTorch's order. Fewer than 2p - 1 micro-batches run in the order of the first ones of 2p - 1.

    Args:
        placement: A V: `rota.wave` with two stages per rank and a split backward.
        num_microbatches: Any number.

    Returns:
        The plan.

    Raises:
        ScheduleError: The placement is not such a V.
    """
    require_v("zb_v", placement, num_microbatches)
    p = placement.num_ranks
    orders = []
    for rank in range(p):
        steps = _steps(rank, p, max(num_microbatches, 2 * p - 1))
        orders.append(count_off(placement, (rank, 2 * p - 1 - rank), steps, num_microbatches))
    return Plan(placement, num_microbatches, tuple(orders))


def _steps(rank: int, p: int, num_microbatches: int) -> list[str]:
    """For `count_off`: 0 is the rank's stage on the way down, 1 the one on the way up. 2p - 1 micro-batches or more."""
    before, after = rank, p - 1 - rank  # the ranks on either side
    return [
        *["F0"] * (2 * after + 1),
        *["F1", "F0"] * before,
        *["F1", "I1", "W1"] * (after + 1),
        *["F0", "I0", "W0", "F1", "I1", "W1"] * (num_microbatches - p - after),
        *["I0", "W0", "F1", "I1", "W1"] * after,
        *["I0", "I1"] * before,
        *["I0", "W0"] * (after + 1),
        *["W1"] * before,
        *["W0"] * before,
    ]


def count_off(
    placement: Placement, stages: Sequence[int], steps: Iterable[str], num_microbatches: int
) -> tuple[Op, ...]:
    """A rank's ops in order.

    The step "F1" is F of the next micro-batch of `stages[1]`; "I1" (with R before it) and "W1" mean the same for I and
    W, and "B1" is I and W. A step for more micro-batches than a stage has is left out.
    """
    batches = [placement.microbatches(stage, num_microbatches) for stage in stages]
    done: Counter[tuple[str, int]] = Counter()
    ops: list[Op] = []
    for step in steps:
        letter, place = step[0], int(step[1])
        for kind in "IW" if letter == "B" else letter:
            done[kind, place] += 1
            for m in batches[place][done[kind, place] - 1 : done[kind, place]]:
                backward = [op for op in backward_ops(placement, stages[place], m) if op.kind is not Kind.W]
                ops += backward if kind == Kind.I else [Op(stages[place], Kind(kind), m)]
    return tuple(ops)


def require_v(name: str, placement: Placement, num_microbatches: int) -> None:
    """Raises ScheduleError unless each rank s has the stages s and 2p - 1 - s, all of them with I and W."""
    require_microbatches(name, num_microbatches)
    down = range(placement.num_ranks)
    require_chain_on(name, placement, [*down, *reversed(down)], _SHAPE)
    require_split(name, placement)
