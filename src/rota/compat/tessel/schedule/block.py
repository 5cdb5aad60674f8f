"""A block: a sub-graph of the model for one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from rota.core.errors import ScheduleError
from rota.core.reading import short

BTYPES = ("forward", "backward")


@final
class Block:
    """A sub-graph of the model for one micro-batch.

    `before` has the blocks that it depends on, `after` those that depend on it.

    Args:
        mid: The micro-batch, from 0.
        span: How many steps it lasts, 1 or more.
        memory: What it allocates (+) or frees (−) when it starts.
        btype: "forward" or "backward", in any case.
        gid: The sub-graph; blocks of different micro-batches with the same number are the same sub-graph.

    Raises:
        ScheduleError: If an argument is wrong.
    """

    def __init__(self, mid: int, span: int, memory: int, btype: str, gid: int | None = None) -> None:
        self.mid = _whole("mid", mid, 0)
        self.span = _whole("span", span, 1)
        self.memory = _whole("memory", memory, None)
        self.btype = str(btype).lower()
        if self.btype not in BTYPES:
            raise ScheduleError(f"btype is {short(btype)}; a block is 'forward' or 'backward'")
        self.gid = gid
        self.before: set[Block] = set()
        self.after: set[Block] = set()

    @staticmethod
    def make_dependency(prev: Block, next: Block) -> None:
        """Make `next` depend on `prev`."""
        prev.after.add(next)
        next.before.add(prev)

    def __repr__(self) -> str:
        return f"{self.btype[0]}{self.mid}"


def _whole(name: str, value: object, least: int | None) -> int:
    """Return a whole number of `least` or more (floats that are whole numbers, too), or raise ScheduleError."""
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if not isinstance(number, int) or isinstance(number, bool) or (least is not None and number < least):
        more = "" if least is None else f" of {least} or more"
        raise ScheduleError(f"{name} of a block is {short(value)}; give a whole number{more}")
    return number


Blocks = dict[tuple[int, int], Block]  #: by (gid, mid)


def by_subgraph(blocks: Sequence[Block]) -> Blocks:
    """Return the blocks by sub-graph and micro-batch.

    The blocks of a single micro-batch need no gid: each is a sub-graph of its own. Raises ScheduleError if a gid or a
    block is missing, or if a block occurs twice.
    """
    found: Blocks = {}
    if len({block.mid for block in blocks}) == 1 and all(block.gid is None for block in blocks):
        return {(gid, 0): block for gid, block in enumerate(blocks)}
    for block in blocks:
        key = gid_of(block), block.mid
        if key in found:
            raise ScheduleError(f"there are two blocks {block} of sub-graph {key[0]}; give each sub-graph its own gid")
        found[key] = block
    if not found:
        raise ScheduleError("the schedule has no blocks; add some")
    mids = range(1 + max(mid for _, mid in found))
    for gid in dict.fromkeys(gid for gid, _ in found):
        missing = next((mid for mid in mids if (gid, mid) not in found), None)
        if missing is not None:
            raise ScheduleError(f"sub-graph {gid} has no block for micro-batch {missing} of 0 to {mids[-1]}; add it")
    return found


def gid_of(block: Block) -> int:
    """Return the sub-graph of a block, or raise ScheduleError if it has none."""
    if block.gid is None:
        raise ScheduleError(f"{block} has no gid; give all blocks of one sub-graph the same number")
    return block.gid
