"""More micro-batches: the repetend of a schedule done more often."""

from __future__ import annotations

from rota.compat.tessel.schedule.block import Block
from rota.compat.tessel.schedule.schedplan import SchedPlan
from rota.errors import ScheduleError

Blocks = dict[tuple[int, int], Block]  #: by (gid, mid)


def unroll(schedule: SchedPlan, nmicros: int) -> SchedPlan:
    """See `SchedPlan.unroll`."""
    blocks = blocks_of(schedule)
    nmids = 1 + max(mid for _, mid in blocks)
    if nmicros < nmids:
        raise ScheduleError(
            f"nmicros is {nmicros}, but the schedule has {nmids} micro-batches; unroll it to {nmids} or more"
        )
    more = nmicros - nmids
    middle, period = _middle(schedule)
    unrolled = SchedPlan(schedule.ndevs)
    new: Blocks = {}
    repeated = [] if schedule.repeated is None else [(_gid(block), block.mid) for block in schedule.repeated]
    for (gid, mid), block in blocks.items():
        times = [(mid, 0)] if mid < middle[gid] else [(mid + more, more)]
        if mid == middle[gid]:
            times = [(mid + i, i) for i in range(more + 1)]
            repeated += [(gid, later) for later, _ in times]
        for later, i in times:
            new[gid, later] = Block(later, block.span, block.memory, block.btype, gid)
            unrolled.add_block(new[gid, later], schedule.device(block), schedule.step(block) + i * period)
    _connect(blocks, new)
    assert schedule.repetend is not None
    first, last = schedule.repetend
    unrolled.repetend, unrolled.period = (first, last + more * period), period
    unrolled.repeated = frozenset(new[key] for key in repeated)
    return unrolled


def blocks_of(schedule: SchedPlan) -> Blocks:
    """Raises ScheduleError where it cannot be told which blocks are the same sub-graph, or one is missing.

    The blocks of a single micro-batch need no gid: each is a sub-graph of its own.
    """
    blocks: Blocks = {}
    added = schedule.added_blocks()
    if len({block.mid for block in added}) == 1 and all(block.gid is None for block in added):
        return {(gid, 0): block for gid, block in enumerate(added)}
    for block in added:
        key = _gid(block), block.mid
        if key in blocks:
            raise ScheduleError(f"there are two blocks {block} of sub-graph {key[0]}; give each sub-graph its own gid")
        blocks[key] = block
    if not blocks:
        raise ScheduleError("the schedule has no blocks; add some")
    mids = range(1 + max(mid for _, mid in blocks))
    for gid in dict.fromkeys(gid for gid, _ in blocks):
        missing = next((mid for mid in mids if (gid, mid) not in blocks), None)
        if missing is not None:
            raise ScheduleError(f"sub-graph {gid} has no block for micro-batch {missing} of 0 to {mids[-1]}; add it")
    return blocks


def _gid(block: Block) -> int:
    if block.gid is None:
        raise ScheduleError(f"{block} has no gid; give all blocks of one sub-graph the same number")
    return block.gid


def _middle(schedule: SchedPlan) -> tuple[dict[int, int], int]:
    """For each sub-graph the last micro-batch in the repetend; how much later it is done again."""
    if schedule.repetend is None:
        raise ScheduleError("the schedule has no repetend; set it to (first step, step after the last), or compose one")
    first, last = schedule.repetend
    repeated = schedule.repeated
    if repeated is None:
        repeated = frozenset(b for b in schedule.all_blocks() if first <= schedule.step(b) < last)
    middle: dict[int, int] = {}
    for block in repeated:
        middle[_gid(block)] = max(block.mid, middle.get(_gid(block), 0))
    absent = {_gid(block) for block in schedule.all_blocks()} - middle.keys()
    if absent:
        raise ScheduleError(f"the repetend {schedule.repetend} has no block of sub-graph {min(absent)}; make it longer")
    return middle, last - first if schedule.period is None else schedule.period


def _connect(blocks: Blocks, new: Blocks) -> None:
    """Each new block with those of its micro-batch, as the old ones are."""
    before = {gid: {prev.gid for prev in block.before if prev.gid is not None} for (gid, _), block in blocks.items()}
    for (gid, mid), block in new.items():
        for prev in before[gid]:
            Block.make_dependency(new[prev, mid], block)
