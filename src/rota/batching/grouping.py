"""From samples to micro-batches: groups of similar lengths, by dynamic programming, for several largest times.

Sorted by length, samples that share a micro-batch are neighbours. For a largest time T of a micro-batch, the groups
with the least time in all come from a dynamic program over the samples, as in Jiang et al., "DynaPipe: Optimizing
Multi-task Training through Dynamic Pipelines", 2024, section 4. A pipeline fills and drains with time that grows with
T, and its memory is shared by the micro-batches in flight: which T is best is found out by a dispatch of each. Where
memory is limited, groups of at most a share of it are tried too, so that a whole number of them fills it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit

from rota.batching.figures import Layout
from rota.batching.problem import Floats, Integers
from rota.errors import SearchError
from rota.sizes import Size
from rota.units import size_text

_NUM_LIMITS = 8  # largest times that are tried
_IN_FLIGHT = (
    0.75,
    0.9,
    1.0,
    1.1,
    1.25,
    1.5,
    2.0,
)  # micro-batches per rank that the memory has room for, if it is limited
_FEWEST, _MOST = 2, 24  # micro-batches per rank, with the largest and the smallest of them


class Grouper:
    """Makes groups of the same samples, for different largest times.

    Args:
        layout: The model on ranks.
        lengths: Per sample its length.
        packed: Whether the samples of a micro-batch follow one another in one row; else rows are padded.

    Raises:
        SearchError: A sample does not fit on a rank even alone, or has no token, or there is no sample.
    """

    def __init__(self, layout: Layout, lengths: Sequence[int], packed: bool) -> None:
        if not lengths:
            raise SearchError("lengths is empty: a batch has at least one sample")
        for sample, length in enumerate(lengths):
            if length < 1:
                raise SearchError(f"lengths[{sample}] is {length}: a sample has at least one token")
        self._packed = packed
        self._num_ranks = layout.placement.num_ranks
        given = np.array(lengths, np.int64)
        self._order = np.argsort(-given, kind="stable")
        self._lengths = given[self._order]
        self._work = layout.work()
        self._needs, self._rooms = _needs(layout)
        self._refuse_what_does_not_fit(layout)

    def groupings(self) -> list[Integers]:
        """Different groupings, for several largest times, and for several numbers of them in flight.

        Each says at which of the sorted samples its groups begin: int64[num_groups].
        """
        sizes = np.stack([self._lengths, self._lengths**2]).astype(np.float64)
        total = float((self._work[:, 1:] @ sizes).max(axis=0).sum() + self._work[:, 0].max() * self._num_ranks)
        limits = np.geomspace(total / (_MOST * self._num_ranks), total / (_FEWEST * self._num_ranks), _NUM_LIMITS)
        found = [self._split(limit, 1.0) for limit in limits.tolist()]
        if len(self._needs):
            found += [self._split(np.inf, max(share * self._num_ranks, 1.0)) for share in _IN_FLIGHT]
        return [*{starts.tobytes(): starts for starts in found}.values()]

    def sizes(self, starts: Integers) -> tuple[Size, ...]:
        """The size of each micro-batch of a grouping."""
        if self._packed:
            tokens, squares = np.add.reduceat(self._lengths, starts), np.add.reduceat(self._lengths**2, starts)
        else:
            longest = self._lengths[starts]
            tokens = np.diff(starts, append=len(self._lengths)) * longest
            squares = tokens * longest
        return tuple(map(Size, tokens.tolist(), squares.tolist()))

    def samples(self, starts: Integers) -> list[tuple[int, ...]]:
        """The samples of each micro-batch of a grouping, rising."""
        return [tuple(sorted(group.tolist())) for group in np.split(self._order, starts[1:])]

    def _split(self, limit_us: float, num_in_flight: float) -> Integers:
        rooms = self._rooms / num_in_flight
        return _split(self._lengths, self._work, self._needs, rooms, limit_us, self._packed)

    def _refuse_what_does_not_fit(self, layout: Layout) -> None:
        """The longest sample is the first."""
        length = int(self._lengths[0])
        if not (self._needs @ np.array([1.0, length, length * length]) > self._rooms).any():
            return
        for rank, (limit, static) in enumerate(
            zip(layout.placement.cluster.limit_bytes, layout.placement.static_bytes, strict=True)
        ):
            need = static + int(np.ceil((layout.needs(rank) @ np.array([1.0, length, length * length])).max()))
            if limit is not None and need > limit:
                raise SearchError(
                    f"sample {self._order[0]} of length {length} fits in no micro-batch: alone it needs {need} bytes "
                    f"({size_text(need)}) on rank {rank}, over its limit of {limit}; cut or drop the sample, raise the "
                    f"limit, or give the rank fewer layers"
                )


def _needs(layout: Layout) -> tuple[Floats, Floats]:
    """(forms, rooms): forms of the bytes that a micro-batch alone needs on some rank, and what the rank has for it."""
    forms, rooms = [np.zeros((0, 3))], [np.zeros(0)]
    limits = zip(layout.placement.cluster.limit_bytes, layout.placement.static_bytes, strict=True)
    for rank, (limit, static) in enumerate(limits):
        if limit is not None:
            found = layout.needs(rank)
            forms.append(found)
            rooms.append(np.full(len(found), limit - static - 2.0 * len(layout.sorted_tasks)))  # bytes are rounded up
    all_forms, all_rooms = np.concatenate(forms), np.concatenate(rooms)
    keep = [
        i for i in range(len(all_forms))
        if not any(
            (all_forms[i] <= all_forms[j]).all() and all_rooms[i] >= all_rooms[j]
            and (j < i or (all_forms[i] < all_forms[j]).any() or all_rooms[i] > all_rooms[j])
            for j in range(len(all_forms)) if j != i
        )
    ]  # fmt: skip
    return all_forms[keep], all_rooms[keep]


@njit(cache=True, nogil=True)
def _split(lengths, work, needs, rooms, limit, packed):  # type: ignore[no-untyped-def]
    """Where groups of the samples begin that take the least time in all.

    None but single samples takes more than `limit` or needs more than `rooms`. If a rank is slowest whatever the group,
    the last group of more samples never begins earlier: where starting later is no slower for some samples, one sample
    more adds no more time to the group that starts later, whose longest sample is no longer.
    """
    count, can_skip = len(lengths), len(work) == 1
    least, begins = np.full(count + 1, np.inf), np.zeros(count + 1, np.int64)
    least[0] = 0.0
    for end in range(1, count + 1):
        tokens, squares = 0.0, 0.0
        for begin in range(end - 1, (begins[end - 1] if can_skip else 0) - 1, -1):
            length, rows = float(lengths[begin]), float(end - begin)
            tokens = tokens + length if packed else rows * length
            squares = squares + length * length if packed else rows * length * length
            time = 0.0
            for i in range(len(work)):
                time = max(time, work[i, 0] + work[i, 1] * tokens + work[i, 2] * squares)
            if rows > 1:
                fits = time <= limit
                for i in range(len(needs)):
                    fits = fits and needs[i, 0] + needs[i, 1] * tokens + needs[i, 2] * squares <= rooms[i]
                if not fits:
                    break
            if least[begin] + time < least[end]:
                least[end], begins[end] = least[begin] + time, begin
    num_groups, end = 0, count
    while end > 0:
        end = begins[end]
        num_groups += 1
    starts, end = np.empty(num_groups, np.int64), count
    for i in range(num_groups - 1, -1, -1):
        end = begins[end]
        starts[i] = end
    return starts
