"""The problem that `cut` solves: layers, the stages they become, the ranks of the stages, and the ranks' memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple, final

from rota.core.layers import LayerCosts

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
