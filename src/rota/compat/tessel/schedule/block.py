"""A sub-graph of the model, for one micro-batch."""

from __future__ import annotations

from typing import final

from rota.errors import ScheduleError
from rota.reading import short

BTYPES = ("forward", "backward")


@final
class Block:
    """`mid`: micro-batch; `span`: steps it takes; `memory` is taken (+) or given back (−) when it starts.

    `before` and `after` are the blocks that it depends on and that depend on it; `gid` says which blocks of different
    micro-batches are the same sub-graph. Raises ScheduleError.
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
        """`next` reads what `prev` makes."""
        prev.after.add(next)
        next.before.add(prev)

    def __repr__(self) -> str:
        return f"{self.btype[0]}{self.mid}"


def _whole(name: str, value: object, least: int | None) -> int:
    """Floats too, as long as they are whole numbers."""
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if not isinstance(number, int) or isinstance(number, bool) or (least is not None and number < least):
        more = "" if least is None else f" of {least} or more"
        raise ScheduleError(f"{name} of a block is {short(value)}; give a whole number{more}")
    return number
