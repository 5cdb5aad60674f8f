"""Zero bubble by hand: the backward split into I, which others wait for, and W, which fills the gaps.

Qi, Wan, Huang and Lin, "Zero Bubble Pipeline Parallelism", 2023, section 2: H1 keeps the memory of 1F1B, H2 takes up to
twice as much and has no bubble at all when F = I = W.

    H1, 2 ranks:  F0 F1 .  I0 W0 F2 I1 W1 …         H2, 2 ranks:  F0 F1 F2 I0 W0 F3 I1 W1 … I W
                  .  F0 I0 F1 I1 W0 F2 I2 W1 …                    .  F0 I0 W0 F1 I1 W1 F2 I2 W2 … I F I W W
"""

from __future__ import annotations

from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.schedules.common import alternate, require_chain_on, require_microbatches, require_split

_SHAPE = "rota.place(costs, cluster)"


def zb_h1(placement: Placement, num_microbatches: int) -> Plan:
    """1F1B with W postponed: rank r runs it r rounds after I, so that all ranks hold as much as rank 0 in 1F1B.

    Args:
        placement: A chain with one stage per rank (`rota.place`) and a split backward.
        num_microbatches: Any number.

    Returns:
        The plan.

    Raises:
        ScheduleError: The placement is not such a chain.
    """
    return _by_hand("zb_h1", placement, num_microbatches, forwards_a_hop=1)


def zb_h2(placement: Placement, num_microbatches: int) -> Plan:
    """Rank r warms up with 2(p - r) - 1 forwards, until the first gradient comes back.

    When rank 0 has no forwards left, it receives gradients faster, so the ranks after it postpone W to deliver them.

    Args:
        placement: A chain with one stage per rank (`rota.place`) and a split backward.
        num_microbatches: Any number.

    Returns:
        The plan.

    Raises:
        ScheduleError: The placement is not such a chain.
    """
    return _by_hand("zb_h2", placement, num_microbatches, forwards_a_hop=2)


def _by_hand(name: str, placement: Placement, num_microbatches: int, forwards_a_hop: int) -> Plan:
    require_microbatches(name, num_microbatches)
    p = placement.num_ranks
    require_chain_on(name, placement, range(p), _SHAPE)
    require_split(name, placement)
    # Rounds in which the first rank still has forwards.
    first_has_forwards = max(num_microbatches - forwards_a_hop * (p - 1), 0)
    orders = []
    for rank in range(p):
        batches = [(rank, m) for m in range(num_microbatches)]
        warmup = min(forwards_a_hop * (p - 1 - rank), num_microbatches)
        postponed = (
            range(rank) if forwards_a_hop == 1 else range(first_has_forwards - rank, num_microbatches - warmup - 1)
        )
        orders.append(alternate(placement, batches, batches, warmup, postponed))
    return Plan(placement, num_microbatches, tuple(orders))
