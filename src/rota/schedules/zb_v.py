"""ZB-V: two stages a rank in a V, with which W fills every bubble in the memory of 1F1B.

Qi, Wan, Huang and Lin, "Zero Bubble Pipeline Parallelism", 2023, section 6. A rank's two stages are 0, the one on the
way down, and 1, the one on the way back up; the last rank has the turn of the V.

    rank 0  F0 F0 F0 .  F1 I1 W1 F1 I1 W1 …        warm-up, then F0 I0 W0 F1 I1 W1 for ever,
    rank 1  .  F0 F1 F0 F1 I1 W1 F0 I0 W0 …        then I0 I1 …, I0 W0 …, and the W that are left
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rota.placement import Placement
from rota.plan import Plan
from rota.schedules.common import backward_ops, require_chain_on, require_microbatches, require_split
from rota.tasks import Kind, Op

SHAPE = "rota.wave(costs, cluster), with two stages a rank"


def zb_v(placement: Placement, num_microbatches: int) -> Plan:
    """A V (`rota.wave`, two stages a rank) with a split backward; any number of micro-batches. PyTorch's order."""
    require_v("zb_v", placement, num_microbatches)
    p = placement.num_ranks
    orders = []
    for rank in range(p):
        steps = _steps(rank, p, max(num_microbatches, 2 * p - 1))
        orders.append(count_off(placement, (rank, 2 * p - 1 - rank), steps, num_microbatches))
    return Plan(placement, num_microbatches, tuple(orders))


def _steps(rank: int, p: int, num_microbatches: int) -> list[str]:
    """What a rank does if there are enough micro-batches to fill the pipeline, 2p - 1 or more."""
    before, after = rank, p - 1 - rank  # ranks on either side
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
    """A rank's ops: "F1" is F of the next micro-batch of `stages[1]`, and so for I (with R before it) and W.

    "B1" is I and W. Micro-batches that a stage does not have are left out.
    """
    batches = [placement.microbatches(stage, num_microbatches) for stage in stages]
    done: Counter[tuple[Kind, int]] = Counter()
    ops: list[Op] = []
    for step in steps:
        where = int(step[1])
        for kind in (Kind.I, Kind.W) if step[0] == "B" else (Kind(step[0]),):
            count = done[kind, where]
            done[kind, where] += 1
            if count >= len(batches[where]):
                continue
            op = Op(stages[where], kind, batches[where][count])
            if kind is Kind.I:
                ops += [back for back in backward_ops(placement, op.stage, op.microbatch) if back.kind is not Kind.W]
            else:
                ops.append(op)
    return tuple(ops)


def require_v(name: str, placement: Placement, num_microbatches: int) -> None:
    """Stage s on rank s, and stage 2p - 1 - s there too; every stage with I and W."""
    require_microbatches(name, num_microbatches)
    down = range(placement.num_ranks)
    require_chain_on(name, placement, [*down, *reversed(down)], SHAPE)
    require_split(name, placement)
