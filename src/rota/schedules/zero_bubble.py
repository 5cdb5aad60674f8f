"""Zero bubble by hand: the backward split into I, which others wait for, and W, which fills the gaps.

Qi, Wan, Huang and Lin, "Zero Bubble Pipeline Parallelism", 2023, section 2: H1 keeps the memory of 1F1B, H2 takes up to
twice as much and has no bubble at all when F = I = W. Section 6: ZB-V has none in the memory of 1F1B. Its chain runs
down the ranks and back up, so the rank that a micro-batch enters first is the one that it leaves last, and both its
backwards start early.

    H1, 2 ranks:  F0 F1 .  I0 W0 F2 I1 W1 …         H2, 2 ranks:  F0 F1 F2 I0 W0 F3 I1 W1 … I W
                  .  F0 I0 F1 I1 W0 F2 I2 W1 …                    .  F0 I0 W0 F1 I1 W1 F2 I2 W2 … I F I W W

    ZB-V, 2 ranks, 4 micro-batches, all ops equally long: no rank ever waits from its first op to its last.
    rank 0   0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
    rank 1   .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
"""

from __future__ import annotations

from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.schedules.common import alternate, count_off, require_chain_on, require_microbatches, require_split, require_v


def zb_h1(placement: Placement, num_microbatches: int) -> Plan:
    """1F1B with W postponed: rank r runs it r rounds after I, so that all ranks hold as much as rank 0 in 1F1B.

    Args:
        placement: A chain with one stage per rank (`rota.place`) and a split backward.
        num_microbatches: Any number.

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

    Raises:
        ScheduleError: The placement is not such a chain.
    """
    return _by_hand("zb_h2", placement, num_microbatches, forwards_a_hop=2)


def _by_hand(name: str, placement: Placement, num_microbatches: int, forwards_a_hop: int) -> Plan:
    require_microbatches(name, num_microbatches)
    p = placement.num_ranks
    require_chain_on(name, placement, range(p), "rota.place(costs, cluster)")
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


def zb_v(placement: Placement, num_microbatches: int) -> Plan:
    """ZB-V in PyTorch's order. Fewer than 2p - 1 micro-batches run in the order of the first ones of 2p - 1.

    Args:
        placement: A V: `rota.wave` with two stages per rank and a split backward.
        num_microbatches: Any number.

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
