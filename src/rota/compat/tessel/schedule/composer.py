"""`Composer`: the best schedules of a placement, found by Rota's search."""

from __future__ import annotations

from typing import final

from rota.compat.tessel.schedule.schedplan import Block, Blocks, SchedPlan, connect, placement_of
from rota.search import Repeating, find_repeating


@final
class Composer:
    """Composes schedules of a warm-up, a repetend with each block once, and a cool-down.

    The repetend has the fewest bubbles of all, and the whole schedule is the shortest with this repetend.

    All three functions take `micro`, a placement; `memory`, the limit per device (None: no limit); and `time_limit_s`,
    which counts nominal seconds of work, so that the answer is the same on every run. They return None if nothing fits,
    or if a micro-batch leaves memory allocated on a device with a limit.
    """

    @staticmethod
    def compose(micro: SchedPlan, memory: int | None, *, time_limit_s: float = 10.0) -> SchedPlan | None:
        """Return the schedule with the fewest micro-batches that the best repetend needs."""
        return Composer.compose_n(micro, memory, None, time_limit_s=time_limit_s)

    @staticmethod
    def compose_n(
        micro: SchedPlan, memory: int | None, nmicros: int | None, *, time_limit_s: float = 10.0
    ) -> SchedPlan | None:
        """Return the schedule with `nmicros` micro-batches; None: the fewest that the best repetend needs."""
        placement = placement_of(micro, memory, micro.added_blocks())
        # A micro-batch of Tessel's is one of each component of the placement.
        num_microbatches = None if nmicros is None else nmicros * placement.num_components
        repeating = find_repeating(placement, num_microbatches, time_limit_s=time_limit_s)
        return None if repeating is None else _to_schedule(micro, repeating)

    @staticmethod
    def compose_fast(
        micro: SchedPlan, memory: int | None, wc_ratio: tuple[int, float] = (128, 0.05), *, time_limit_s: float = 10.0
    ) -> SchedPlan | None:
        """Return what `compose` returns, which is fast; `wc_ratio` ended Tessel's heuristic, and is not used here."""
        del wc_ratio
        return Composer.compose_n(micro, memory, None, time_limit_s=time_limit_s)


def _to_schedule(micro: SchedPlan, repeating: Repeating) -> SchedPlan:
    """Return the solution as blocks; sub-graph `gid` is the placement's block with this number."""
    schedule, blocks = SchedPlan(micro.ndevs), Blocks()
    index = {block: gid for gid, block in enumerate(micro.added_blocks())}
    for (block, gid), starts in zip(index.items(), repeating.starts_us, strict=True):
        for mid, start in enumerate(starts):
            blocks[gid, mid] = Block(mid, block.span, block.memory, block.btype, gid)
            schedule.add_block(blocks[gid, mid], micro.device(block), start)
    connect(blocks, {gid: [index[prev] for prev in block.before] for block, gid in index.items()})
    repeated = frozenset(blocks[gid, mid] for gid, mid in enumerate(repeating.middle))
    schedule.repetend = (
        min(schedule.step(block) for block in repeated),
        max(schedule.step(block) + block.span for block in repeated),
    )
    schedule.repeated, schedule.period = repeated, repeating.period_us
    return schedule
