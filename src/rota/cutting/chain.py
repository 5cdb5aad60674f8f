"""The problem that `cut` solves, and its exact answer for one stage per rank, by bisection and dynamic programming.

For each stage the possible ends are between two bands: the layers that are left must fit into the later stages, and
full earlier stages reach only so far. Near the optimum the bands are narrow, and the dynamic program is short.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple, final

from rota.core.layers import LayerCosts

Fits = Callable[[int, int, int], bool]  # (stage, start, end): whether these layers fit in memory as that stage

_FIRST_STEP = 1024  # the first step upwards from a lower bound is this small a part of it
_NUM_CACHED_TABLES = 16  # of the latest models: comparing cuts needs the tables of the same model many times


@final
@dataclass(frozen=True, slots=True)
class CutProblem:
    """Layers to divide into stages in order; stage s runs on rank `rank_of[s]`.

    `prefixes[stage][i]` is the time in µs of layers 0 to i - 1 on that stage. Rank times are counted in units that keep
    them whole: one µs on rank r is `weights[r]` units.
    """

    num_layers: int
    rank_of: Sequence[int]
    prefixes: Sequence[Sequence[int]]
    weights: Sequence[int]
    memory: StageMemory | None

    @property
    def num_stages(self) -> int:
        """Number of stages on all ranks."""
        return len(self.rank_of)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.weights)

    def rank_times(self, boundaries: Sequence[int]) -> list[int]:
        """Time of each rank, in units."""
        times = [0] * self.num_ranks
        for stage, (start, end) in enumerate(pairwise(boundaries)):
            rank, prefix = self.rank_of[stage], self.prefixes[stage]
            times[rank] += (prefix[end] - prefix[start]) * self.weights[rank]
        return times

    def budgets_us(self, bound: int) -> list[int]:
        """Time for each rank's layers if its time must not exceed `bound` units."""
        return [bound // weight for weight in self.weights]

    def excess_bytes(self, boundaries: Sequence[int]) -> int:
        """Bytes above the memory limits, summed over the ranks."""
        if self.memory is None:
            return 0
        held, peaks = [0] * self.num_ranks, [0] * self.num_ranks
        for stage, run in enumerate(pairwise(boundaries)):
            rank, needed = self.rank_of[stage], self.memory.needed(stage, *run)
            held[rank] += needed.held_bytes
            peaks[rank] = max(peaks[rank], needed.peak_bytes)
        ranks = zip(held, peaks, self.memory.limits, strict=True)
        return sum(max(size + peak - limit, 0) for size, peak, limit in ranks if limit is not None)

    @property
    def exceeds_total_memory(self) -> bool:
        """Whether no cut can fit, because the layers need at least more bytes than all ranks have together."""
        memory = self.memory
        if memory is None or None in memory.limits:
            return False
        last_stages = [min(layer, self.num_stages - 1) for layer in range(self.num_layers)]
        return memory.least_bytes(last_stages) > sum(limit for limit in memory.limits if limit is not None)

    @property
    def upper_bound(self) -> int:
        """A time in units that no rank exceeds in any cut."""
        return max(prefix[-1] for prefix in self.prefixes) * max(self.weights)


class StageBytes(NamedTuple):
    """Memory of a stage: `held_bytes` add up over a rank's stages; only the largest `peak_bytes` counts."""

    held_bytes: int
    peak_bytes: int


@final
class StageMemory:
    """Bytes of every possible stage, computed as `LayerCosts.stages` does, and the ranks' limits.

    A stage holds its static bytes and, for each of `in_flight[stage]` micro-batches, its activations, or its
    checkpoint if it recomputes. The peak of an op, and the recomputed activations of one micro-batch, are added.
    """

    def __init__(
        self,
        layers: LayerCosts,
        limits: Sequence[int | None],
        in_flight: Sequence[int],
        recompute: Collection[int],
    ) -> None:
        self.limits = limits
        self._in_flight = in_flight
        self._recompute = frozenset(recompute)
        self._runs = [_cached_runs(layers, recomputed) for recomputed in (False, True)]
        # Lower bounds: what two layers share is subtracted from the later one, wherever the earlier one is.
        static, kept = list(layers.static_bytes), list(layers.kept_bytes)
        for column, pairs in ((static, layers.tied), (kept, layers.shared)):
            for _, layer, size in pairs:
                column[layer] -= size
        self._least_kept = [max(size, 0) for size in kept]
        self._static_sums = [0, *accumulate(max(size, 0) for size in static)]
        self._kept_sums = [0, *accumulate(self._least_kept)]

    def fits(self, stage: int, start: int, end: int, available_bytes: int, peak_bytes: int = 0) -> bool:
        """Whether layers start to end - 1 fit as this stage; other stages of the rank need `peak_bytes` at once."""
        in_flight = 0 if stage in self._recompute else self._in_flight[stage]
        kept = in_flight * (self._kept_sums[end] - self._kept_sums[start])
        if self._static_sums[end] - self._static_sums[start] + kept > available_bytes:
            return False
        needed = self.needed(stage, start, end)
        return needed.held_bytes + max(needed.peak_bytes, peak_bytes) <= available_bytes

    def needed(self, stage: int, start: int, end: int) -> StageBytes:
        """Memory of layers start to end - 1 as this stage."""
        run = self._runs[stage in self._recompute][start, end]
        return StageBytes(run.static_bytes + self._in_flight[stage] * run.kept_bytes, run.peak_bytes)

    def least_static_bytes(self, start: int) -> int:
        """Lower bound on the static bytes of all layers from `start`."""
        return self._static_sums[-1] - self._static_sums[start]

    def least_bytes(self, last_stages: Sequence[int]) -> int:
        """Lower bound on the bytes of all layers if layer i is in one of the stages 0 to last_stages[i]."""
        counts = [0 if stage in self._recompute else number for stage, number in enumerate(self._in_flight)]
        fewest = [*accumulate(counts, min)]
        kept = zip(self._least_kept, last_stages, strict=True)
        return self._static_sums[-1] + sum(size * fewest[last] for size, last in kept)


class _RunBytes(NamedTuple):
    """A run of layers as a stage: static bytes, bytes kept per micro-batch, and bytes that an op needs besides."""

    static_bytes: int
    kept_bytes: int
    peak_bytes: int


@final
class _Runs(dict[tuple[int, int], _RunBytes]):
    """Bytes of runs of layers by (start, end), computed on first use.

    The memory of a stage depends only on its own layers. So one call of `LayerCosts.stages` computes all stages of one
    length that tile the model.
    """

    def __init__(self, layers: LayerCosts, recomputed: bool) -> None:
        super().__init__()
        self._layers, self._recomputed = layers, recomputed

    def __missing__(self, run: tuple[int, int]) -> _RunBytes:
        start, end = run
        length, num_layers = end - start, self._layers.num_layers
        boundaries = sorted({0, *range(start % length, num_layers + 1, length), num_layers})
        stages = range(len(boundaries) - 1) if self._recomputed else ()
        costs = self._layers.stages(boundaries, recompute=stages)
        for stage, tile in enumerate(pairwise(boundaries)):
            held = costs.activation_bytes[stage]
            kept = costs.checkpoint_bytes[stage] if self._recomputed else held
            peak = max(costs.forward_peak_bytes[stage], costs.backward_peak_bytes[stage])
            self[tile] = _RunBytes(costs.static_bytes[stage], kept, held - kept + peak)
        return self[run]


_cached_runs = lru_cache(_NUM_CACHED_TABLES)(_Runs)


def cut_chain(problem: CutProblem) -> list[int] | None:
    """Boundaries that minimize the slowest rank's time, then the sum of squares; None if nothing fits in memory."""
    memory = problem.memory

    def fits(stage: int, start: int, end: int) -> bool:
        assert memory is not None
        limit = memory.limits[problem.rank_of[stage]]
        return limit is None or memory.fits(stage, start, end, limit)

    def budgets(bound: int) -> list[int]:
        return [bound // problem.weights[rank] for rank in problem.rank_of]

    def cut_within(bound: int) -> list[int] | None:
        spent = [0] * problem.num_stages
        ends = balanced_ends(problem, 0, 0, budgets(bound), spent, None if memory is None else fits)
        return None if ends is None else [0, *ends]

    if problem.exceeds_total_memory:
        return None
    low = least(0, problem.upper_bound, lambda bound: _bands(problem, 0, 0, budgets(bound)) is not None)
    best = cut_within(low)
    if best is not None:
        return best
    # Memory, or a layer that fits only some ranks, needs a larger bound: double the step until a cut fits, then bisect.
    step, high = max(low // _FIRST_STEP, 1), low
    while best is None:
        if high == problem.upper_bound:
            return None
        low, high, step = high + 1, min(high + step, problem.upper_bound), 2 * step
        best = cut_within(high)
    high = max(problem.rank_times(best))
    while low < high:
        middle = (low + high) // 2
        boundaries = cut_within(middle)
        if boundaries is None:
            low = middle + 1
        else:
            high = max(problem.rank_times(boundaries))
    return cut_within(high)


def least(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The least number from `low` to `high` for which `holds` is true; it must be monotone, and true for `high`."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _bands(problem: CutProblem, first: int, start: int, budgets_us: Sequence[int]) -> list[range] | None:
    """The possible ends of each stage from `first`, which begins at `start`; None if a stage has no possible end."""
    stages = range(first, problem.num_stages)
    highs, high = [], start
    for stage, budget in zip(stages, budgets_us, strict=True):
        prefix = problem.prefixes[stage]
        high = min(bisect_right(prefix, prefix[high] + budget) - 1, problem.num_layers - (stages[-1] - stage))
        highs.append(high)
    if high < problem.num_layers:
        return None
    lows, low = [problem.num_layers], problem.num_layers
    for i in range(len(stages) - 1, 0, -1):
        prefix = problem.prefixes[stages[i]]
        low = max(bisect_left(prefix, prefix[low] - budgets_us[i]), start + i)
        lows.append(low)
    bands = [range(low, high + 1) for low, high in zip(reversed(lows), highs, strict=True)]
    return bands if all(bands) else None


def balanced_ends(
    problem: CutProblem,
    first: int,
    start: int,
    budgets_us: Sequence[int],
    spent_us: Sequence[int],
    fits: Fits | None,
) -> list[int] | None:
    """Ends of the stages from `first`, which begins at `start`, within the budgets, with the least sum of squares.

    `spent_us`: other time of each stage's rank. No stage is empty. None if nothing fits.
    """
    possible = _bands(problem, first, start, budgets_us)
    if possible is None:
        return None
    best = {start: 0}  # end -> least sum of squares
    steps: list[dict[int, int]] = []
    for i, ends in enumerate(possible):
        stage = first + i
        prefix, weight = problem.prefixes[stage], problem.weights[problem.rank_of[stage]]
        least_squares: dict[int, int] = {}
        came_from: dict[int, int] = {}
        for begin, squares in best.items():
            before, latest = spent_us[i] - prefix[begin], prefix[begin] + budgets_us[i]
            for end in range(max(begin + 1, ends.start), ends.stop):
                if prefix[end] > latest:
                    break
                if fits is not None and not fits(stage, begin, end):
                    continue
                total = squares + ((before + prefix[end]) * weight) ** 2
                if end not in least_squares or total < least_squares[end]:
                    least_squares[end], came_from[end] = total, begin
        best = least_squares
        steps.append(came_from)
    if problem.num_layers not in best:
        return None
    result = [problem.num_layers]
    for came_from in reversed(steps):
        result.append(came_from[result[-1]])
    return result[-2::-1]
