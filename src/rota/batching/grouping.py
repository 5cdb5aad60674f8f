"""From samples to micro-batches: groups of similar lengths, by dynamic programming, for several largest times.

Sorted by length, samples that share a micro-batch are neighbours. For a largest time T of a micro-batch, the groups
with the least time in all come from a dynamic program over the samples, as in Jiang et al., "DynaPipe: Optimizing
Multi-task Training through Dynamic Pipelines", 2024, section 4. A pipeline fills and drains with time that grows with
T, and its memory is shared by the micro-batches in flight: which T is best is found out by a dispatch of each. Where
memory is limited, groups of at most a share of it are tried too, so that a whole number of them fills it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rota.batching.figures import Layout, undominated
from rota.batching.problem import Floats, Integers
from rota.compiled import inner, loop
from rota.core.errors import NothingFitsError, SearchError
from rota.core.sizes import Size
from rota.core.text import size_text

_NUM_LIMITS = 8  # largest times that are tried
#: Micro-batches per rank that the memory has room for, if it is limited.
_IN_FLIGHT = (0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
_FEWEST, _MOST = 2, 24  # micro-batches per rank, with the largest and the smallest of them


class _Groups(NamedTuple):
    """What the time of a group follows from, and what is allowed."""

    lengths: Floats  #: float64[num_samples], falling
    tokens: Floats  #: float64[num_samples + 1]: sums of the first lengths
    squares: Floats  #: float64[num_samples + 1]: sums of their squares
    curve: Floats  #: float64[3]: µs as a form of (1, tokens, squares)
    needs: Floats  #: float64[num_forms, 3]: bytes as forms of the same
    rooms: Floats  #: float64[num_forms]: the most that each of these may be
    limit_us: float  #: the most time of a group of several samples
    packed: bool


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
        self._order = np.argsort(-np.array(lengths, np.int64), kind="stable")
        self._lengths = np.array(lengths, np.int64)[self._order]
        falling = self._lengths.astype(np.float64)
        sums = [np.concatenate([[0.0], np.cumsum(falling**power)]) for power in (1, 2)]
        self._sums = (falling, sums[0], sums[1])
        work = layout.work()
        self._curve = work[int((work[:, 1] * sums[0][-1] + work[:, 2] * sums[1][-1]).argmax())]  # of the busiest rank
        self._needs, self._rooms = _needs(layout)
        self._refuse_what_does_not_fit(layout)

    def groupings(self) -> list[Integers]:
        """Different groupings, for several largest times, and for several numbers of them in flight.

        Each says at which of the sorted samples its groups begin: int64[num_groups].
        """
        _, tokens, squares = self._sums
        total = float(self._curve @ [self._num_ranks, tokens[-1], squares[-1]])
        limits = np.geomspace(total / (_MOST * self._num_ranks), total / (_FEWEST * self._num_ranks), _NUM_LIMITS)
        groupings = [_split(self._groups(limit, 1.0)) for limit in limits.tolist()]
        if len(self._needs):
            groupings += [_split(self._groups(np.inf, max(share * self._num_ranks, 1.0))) for share in _IN_FLIGHT]
            groupings.append(_fill(self._groups(np.inf, self._num_ranks)))
        return [*{starts.tobytes(): starts for starts in groupings}.values()]

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

    def _groups(self, limit_us: float, num_in_flight: float) -> _Groups:
        rooms = self._rooms / num_in_flight
        return _Groups(*self._sums, self._curve, self._needs, rooms, limit_us, self._packed)

    def _refuse_what_does_not_fit(self, layout: Layout) -> None:
        """The longest sample is the first."""
        length = int(self._lengths[0])
        size = np.array([1.0, length, length * length])
        if not (self._needs @ size > self._rooms).any():
            return
        for rank, (limit, static) in enumerate(
            zip(layout.placement.cluster.limit_bytes, layout.placement.static_bytes, strict=True)
        ):
            need = static + int(np.ceil((layout.needs(rank) @ size).max()))
            if limit is not None and need > limit:
                raise NothingFitsError(
                    f"sample {self._order[0]} of length {length} fits in no micro-batch: alone it needs {need} bytes "
                    f"({size_text(need)}) on rank {rank}, over its limit of {limit}; cut or drop the sample, raise the "
                    f"limit, or give the rank fewer layers"
                )


def _needs(layout: Layout) -> tuple[Floats, Floats]:
    """(forms, rooms): forms of the bytes that a micro-batch alone needs on some rank, and what the rank has for it."""
    rows = [np.zeros((0, 4))]
    limits = zip(layout.placement.cluster.limit_bytes, layout.placement.static_bytes, strict=True)
    for rank, (limit, static) in enumerate(limits):
        if limit is not None:
            needs = layout.needs(rank)
            room = limit - static - 2.0 * len(layout.sorted_tasks)  # bytes are rounded up
            rows.append(np.column_stack([needs, np.full(len(needs), -room)]))  # less room is as more needs
    strictest = undominated(np.concatenate(rows))
    return strictest[:, :3].copy(), -strictest[:, 3]


@loop
def _split(groups: _Groups) -> Integers:
    """Where groups of the samples begin that take the least time in all, as `_time` has it.

    A later begin that is as good as an earlier one stays so when samples are added at the end: to the
    group that begins later, whose longest sample is no longer, they add no more. So each begin is best for one range of
    ends at most, and a queue has these ranges (Hirschberg and Larmore, "The Least Weight Subsequence Problem", 1987).
    """
    count = len(groups.lengths)
    least, begins = np.zeros(count + 1), np.zeros(count + 1, np.int64)
    queue, since = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)  # begins, and their first ends
    head, tail = 0, 0
    for end in range(1, count + 1):
        begin = end - 1
        while tail - head > 1 and since[head + 1] <= end:
            head += 1
        if tail > head:
            since[head] = max(since[head], end)
        while tail > head and _is_better(least, begin, queue[tail - 1], since[tail - 1], groups):
            tail -= 1
        low = end
        if tail > head:
            low, high = since[tail - 1] + 1, count + 1
            while low < high:
                middle = (low + high) // 2
                if _is_better(least, begin, queue[tail - 1], middle, groups):
                    high = middle
                else:
                    low = middle + 1
        if low <= count:
            queue[tail], since[tail] = begin, low
            tail += 1
        begins[end] = queue[head]
        least[end] = least[queue[head]] + _time(queue[head], end, groups)
    num_groups, end = 0, count
    while end > 0:
        end = begins[end]
        num_groups += 1
    starts, end = np.empty(num_groups, np.int64), count
    for i in range(num_groups - 1, -1, -1):
        end = begins[end]
        starts[i] = end
    return starts


@loop
def _fill(groups: _Groups) -> Integers:
    """Where groups of the samples begin that are as full as may be, one after the other."""
    count = len(groups.lengths)
    starts, num_groups = np.zeros(count, np.int64), 1
    for end in range(1, count):
        if _time(starts[num_groups - 1], end + 1, groups) == np.inf:
            starts[num_groups] = end
            num_groups += 1
    return starts[:num_groups]


@inner
def _is_better(least: Floats, begin: int, other: int, end: int, groups: _Groups) -> bool:
    """Whether the last group of the samples before `end` may as well begin at `begin` as at `other`."""
    is_better: bool = least[begin] + _time(begin, end, groups) <= least[other] + _time(other, end, groups)
    return is_better


@inner
def _time(begin: int, end: int, groups: _Groups) -> float:
    """The time of a group; infinite if it may not be: more than one sample over the limit or the rooms."""
    lengths, tokens, squares, curve, needs, rooms, limit, packed = groups
    rows, length = end - begin, lengths[begin]
    group_tokens = tokens[end] - tokens[begin] if packed else rows * length
    group_squares = squares[end] - squares[begin] if packed else rows * length * length
    time = curve[0] + curve[1] * group_tokens + curve[2] * group_squares
    if rows > 1:
        if time > limit:
            return np.inf
        for i in range(len(needs)):
            if needs[i, 0] + needs[i, 1] * group_tokens + needs[i, 2] * group_squares > rooms[i]:
                return np.inf
    return time
