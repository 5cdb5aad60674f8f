"""The question that a cut answers: layers, the stages they become, and the ranks that the stages are dealt to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from rota.cutting.room import Room


@final
@dataclass(frozen=True, slots=True)
class Deal:
    """`rank_of[stage]`; `prefixes[stage][i]`: µs that layers 0 to i - 1 take there; `extra_us[stage]` on top of them.

    A rank's time is counted in units: one µs on rank r is `weights[r]` of them, so that all of it is whole numbers.
    """

    num_layers: int
    rank_of: Sequence[int]
    prefixes: Sequence[Sequence[int]]
    extra_us: Sequence[int]
    weights: Sequence[int]
    room: Room | None

    @property
    def num_stages(self) -> int:
        return len(self.rank_of)

    @property
    def num_ranks(self) -> int:
        return len(self.weights)

    def times(self, boundaries: Sequence[int]) -> list[int]:
        """Of each rank, in units."""
        times = [0] * self.num_ranks
        for stage, (start, end) in enumerate(pairwise(boundaries)):
            rank, prefix = self.rank_of[stage], self.prefixes[stage]
            times[rank] += (prefix[end] - prefix[start] + self.extra_us[stage]) * self.weights[rank]
        return times

    def capacities(self, bound: int) -> list[int]:
        """µs that each rank's layers may take, so that its time is `bound` at most; below 0 where none may."""
        left = [bound // weight for weight in self.weights]
        for rank, extra in zip(self.rank_of, self.extra_us, strict=True):
            left[rank] -= extra
        return left

    def excess_bytes(self, boundaries: Sequence[int]) -> int:
        """What the ranks hold above their limits, all together."""
        if self.room is None:
            return 0
        always, on_top = [0] * self.num_ranks, [0] * self.num_ranks
        for stage, run in enumerate(pairwise(boundaries)):
            rank, held = self.rank_of[stage], self.room.held(stage, *run)
            always[rank] += held.always_bytes
            on_top[rank] = max(on_top[rank], held.on_top_bytes)
        ranks = zip(always, on_top, self.room.limits, strict=True)
        return sum(max(sum_ + top - limit, 0) for sum_, top, limit in ranks if limit is not None)

    @property
    def is_hopeless(self) -> bool:
        """Whether all ranks together have too little memory for any cut, by what each layer holds at least."""
        room = self.room
        if room is None or None in room.limits:
            return False
        last_stages = [min(layer, self.num_stages - 1) for layer in range(self.num_layers)]
        return room.least_bytes(last_stages) > sum(limit for limit in room.limits if limit is not None)

    @property
    def slowest(self) -> int:
        """A bound that every cut meets."""
        whole = max(prefix[-1] for prefix in self.prefixes) + sum(self.extra_us)
        return whole * max(self.weights)
