"""A new rank, whose memory is empty, gets its state from a peer: the rank of another replica with the same stages.

voting   each rank ── its part of the state, and the steps that it holds ──▶ all
         a new rank holds none, and has no vote if a peer holds some
taking   the peer ── the state after the step that they agree on ──▶ the new rank: it holds the step last of all
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, final

import torch
import torch.distributed as dist

from rota.runtime.checkpoints.all_ranks import Ranks
from rota.runtime.checkpoints.in_memory import StatesInMemory
from rota.runtime.environment import is_new, node_of_this_process
from rota.runtime.transport import collective

_PIECE_BYTES = 1 << 28


class _Vote(NamedTuple):
    """`of`: which part of the state; `is_new`: its memory is empty; `steps`: each that it holds, with its bytes."""

    of: str
    node: int
    is_new: bool
    steps: dict[int, int]


@final
class Votes:
    """Which steps each rank holds. To make it is collective."""

    def __init__(self, in_memory: StatesInMemory, ranks: Ranks) -> None:
        self._in_memory, self._ranks = in_memory, ranks
        mine = in_memory.of, node_of_this_process(), is_new() and in_memory.is_empty, [*in_memory.sizes.items()]
        self._votes = [_Vote(of, node, new, dict(steps)) for of, node, new, steps in ranks.gather(mine)]

    @property
    def common(self) -> set[int]:
        """The steps that all ranks hold, or can take from a peer that does."""
        return common_steps([(vote.of, vote.is_new, {*vote.steps}) for vote in self._votes])

    def take(self, step: int) -> int | None:
        """Give new ranks the state after a common step. Collective.

        Returns:
            The first process that lacks memory for its state, and then none has taken any; None if all hold the step.
        """
        pairs = [(self._giver(vote.of, step), i) for i, vote in enumerate(self._votes) if step not in vote.steps]
        if not pairs:
            return None
        mine, room = self._ranks.mine, None
        num_bytes = {new: self._votes[giver].steps[step] for giver, new in pairs}
        num_new_here = sum(self._votes[new].node == node_of_this_process() for new in num_bytes)
        # All look before any takes: what one takes must not count against the others.
        has_room = mine not in num_bytes or self._in_memory.has_room_for(num_bytes[mine], num_new_here)
        if (process := self._first_without(has_room)) is not None:
            return process
        if mine in num_bytes:
            with suppress(OSError):
                room = self._in_memory.begin_to_take(num_bytes[mine])
        if (process := self._first_without(mine not in num_bytes or room is not None)) is not None:
            return process
        with collective(f"giving new ranks the state of step {step}"):
            for giver, new in pairs:
                if mine == giver:
                    for piece in _pieces(self._in_memory.data(step)):
                        dist.send(piece, group_dst=new, group=self._ranks.group)
                elif mine == new and room is not None:
                    for piece in _pieces(room):
                        dist.recv(piece, group_src=giver, group=self._ranks.group)
                    self._in_memory.take(step, num_bytes[mine])
        return None

    def _first_without(self, has_room: bool) -> int | None:
        """The first process that has no room; None if all have. Collective."""
        return next((process for process, has in enumerate(self._ranks.gather(has_room)) if not has), None)

    def _giver(self, of: str, step: int) -> int:
        return next(i for i, vote in enumerate(self._votes) if vote.of == of and step in vote.steps)


def common_steps(votes: Sequence[tuple[str, bool, set[int]]]) -> set[int]:
    """The steps that all ranks hold, or can take from a peer that does.

    Args:
        votes: of each rank the part of the state that it has, whether it is new, and the steps that it holds.
    """
    held_of = {of for of, _, steps in votes if steps}
    return set.intersection(*(steps for of, is_new, steps in votes if not is_new or of not in held_of))


def _pieces(data: memoryview) -> list[torch.Tensor]:
    """The bytes as tensors on the same memory."""
    starts = range(0, len(data), _PIECE_BYTES)
    return [torch.frombuffer(data[start : start + _PIECE_BYTES], dtype=torch.uint8) for start in starts]
