"""V-Half and V-Min: a smaller bubble than 1F1B's, in about half, and in about a third, of its activation memory.

Qi, Wan, Amar and Lin, "Pipeline Parallelism with Controllable Memory", 2024, section 3. All ops of one micro-batch are
a building block, which is repeated every 6 slots: F, I and W of a rank's two stages take one slot each. The longer a
stage holds a micro-batch, the more micro-batches it holds at a time. In a V, one stage of each rank holds it for a
short time and the other for a long time.

The block of V-Min on 4 ranks, where each hop takes one slot (in V-Half: 1 down and 2 up):

    slot     0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15
    rank 0   F0 .  .  .  .  .  .  F1 I1 .  .  .  .  .  .  I0        stage 0 on the way down, 1 on the way up;
    rank 1   .  F0 .  .  .  .  F1 .  .  I1 .  .  .  .  I0 .         W where the repeated blocks leave a slot
    rank 2   .  .  F0 .  .  F1 .  .  .  .  I1 .  .  I0 .  .
    rank 3   .  .  .  F0 F1 .  .  .  .  .  .  I1 I0 .  .  .

A rank's slots must differ modulo 6, so a block may wait at its three turns: of the forwards, at the loss, and of the
gradients. The repeated blocks are then squeezed together. Costs are never as equal as slots, so all blocks that fit the
memory are tried, each squeezed in several ways, and the fastest plan is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, product

from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.core.stopping import look
from rota.schedules.common import require_v
from rota.schedules.greedy import ListScheduler, fastest, path_through

_INTERVAL = 6
_LONGEST_WAITS = 6  # slots that a block waits at its three turns together; more is hardly ever faster
#: How to squeeze: how many slots after I begins W counts as done, and how many an op may go ahead of its turn. The
#: first always finds a plan: the op that is due first has its inputs and, as the block fits, memory once W is done.
_SQUEEZES = ((2, 0), (2, 2), (2, 3), (4, 3))


def v_half(placement: Placement, num_microbatches: int) -> Plan:
    """Each of p ranks holds at most 2 * ((p + 2) // 2) activations of a stage; 1F1B holds 2p of them.

    Args:
        placement: A V: `rota.wave` with two stages per rank and a split backward.
        num_microbatches: Any number.

    Raises:
        ScheduleError: The placement is not such a V.
    """
    require_v("v_half", placement, num_microbatches)
    limit = 2 * ((placement.num_ranks + 2) // 2)
    return fastest(_schedulers(placement, num_microbatches, (1, 2, 1, 2), limit))


def v_min(placement: Placement, num_microbatches: int) -> Plan:
    """Each of p ranks holds at most 2 * ((p + 4) // 3) activations of a stage; 1F1B holds 2p of them.

    Args:
        placement: A V: `rota.wave` with two stages per rank and a split backward.
        num_microbatches: Any number.

    Raises:
        ScheduleError: The placement is not such a V.
    """
    require_v("v_min", placement, num_microbatches)
    limit = 2 * ((placement.num_ranks + 4) // 3)
    return fastest(_schedulers(placement, num_microbatches, (1, 1, 1, 1), limit))


def _schedulers(
    placement: Placement, num_microbatches: int, hops: tuple[int, ...], limit: int
) -> Iterator[ListScheduler]:
    """`hops`: slots between neighbouring ranks for forwards down and up, and for gradients down and up."""
    legs = path_through(placement, postpones_weights=True)
    for block in _blocks(placement.num_ranks, hops, limit):
        turns = [range(start, start + _INTERVAL * num_microbatches, _INTERVAL) for start in block]
        for until_weight, slots_ahead in _SQUEEZES:
            spans = [block[-1 - stage] + until_weight - block[stage] for stage in placement.stages]
            stage_limits = [-(-span // _INTERVAL) for span in spans]
            yield ListScheduler(placement, legs, turns, slots_ahead, limit, stage_limits)


def _blocks(p: int, hops: tuple[int, ...], limit: int) -> Iterator[tuple[int, ...]]:
    """The blocks that fit: slots of a micro-batch's 2p F and 2p I, in the order in which it passes through them."""
    for waits in product(range(_INTERVAL), repeat=3):
        look()
        if sum(waits) <= _LONGEST_WAITS:
            steps = [step for hop, wait in zip(hops, (*waits, 0), strict=True) for step in (*[hop] * (p - 1), 1 + wait)]
            block = tuple(accumulate(steps[:-1], initial=0))
            if all(_fits([(block[s], block[-1 - s]) for s in (rank, 2 * p - 1 - rank)], limit) for rank in range(p)):
                yield block


def _fits(spans: list[tuple[int, int]], limit: int) -> bool:
    """Whether a rank's stages, each from F to I, never need the same slot, and never hold more than `limit`."""
    if len({slot % _INTERVAL for span in spans for slot in span}) < 2 * len(spans):
        return False
    held = [sum((now - f) // _INTERVAL - (now - i) // _INTERVAL for f, i in spans) for now, _ in spans]
    return max(held) <= limit
