"""What a run of layers, as a stage, holds: by which a cut is refused that would not fit in memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple, final

from rota.layers import LayerCosts

_KEPT_TABLES = 16  # of models asked for last: whoever compares cuts asks again and again


class Held(NamedTuple):
    """Of a stage: `always_bytes` adds up over the stages of a rank, of `on_top_bytes` the largest counts."""

    always_bytes: int
    on_top_bytes: int


@final
class Room:
    """Bytes of every possible stage, as `LayerCosts.stages` has them.

    A stage keeps its static bytes and, of each of `in_flight[stage]` micro-batches, its activations, or what it begins
    again from if it recomputes. On top come the peak of an op and the activations of the one that is made again.
    """

    def __init__(
        self,
        layers: LayerCosts,
        limits: Sequence[int | None],
        in_flight: Sequence[int],
        split_backward: bool,
        recompute: Collection[int],
    ) -> None:
        self.limits = limits
        self._in_flight = in_flight
        self._recompute = frozenset(recompute)
        self._runs = [_runs_of(layers, split_backward, recomputed) for recomputed in (False, True)]
        # At least: what layers share is taken off the later one, wherever the earlier one is.
        static, kept = list(layers.static_bytes), list(layers.kept_bytes)
        for column, pairs in ((static, layers.tied), (kept, layers.shared)):
            for _, layer, size in pairs:
                column[layer] -= size
        self._least_kept = [max(size, 0) for size in kept]
        self._static_sums = [0, *accumulate(max(size, 0) for size in static)]
        self._kept_sums = [0, *accumulate(self._least_kept)]

    def fits(self, stage: int, start: int, end: int, left_bytes: int, on_top_bytes: int = 0) -> bool:
        """Whether the layers start to end - 1 fit as that stage, beside others of the rank that need `on_top_bytes`."""
        in_flight = 0 if stage in self._recompute else self._in_flight[stage]
        kept = in_flight * (self._kept_sums[end] - self._kept_sums[start])
        if self._static_sums[end] - self._static_sums[start] + kept > left_bytes:
            return False
        held = self.held(stage, start, end)
        return held.always_bytes + max(held.on_top_bytes, on_top_bytes) <= left_bytes

    def held(self, stage: int, start: int, end: int) -> Held:
        """By the layers start to end - 1, as that stage."""
        static, kept, on_top = self._runs[stage in self._recompute][start, end]
        return Held(static + self._in_flight[stage] * kept, on_top)

    def static_bytes(self, start: int) -> int:
        """Of all layers from there, at least."""
        return self._static_sums[-1] - self._static_sums[start]

    def least_bytes(self, last_stages: Sequence[int]) -> int:
        """What all layers hold at least, layer i in one of the stages 0 to last_stages[i]."""
        counts = [0 if stage in self._recompute else number for stage, number in enumerate(self._in_flight)]
        fewest = [*accumulate(counts, min)]
        kept = zip(self._least_kept, last_stages, strict=True)
        return self._static_sums[-1] + sum(size * fewest[last] for size, last in kept)


class _Run(NamedTuple):
    """As a stage: static bytes, what each micro-batch keeps, what an op needs on top of that."""

    static: int
    kept: int
    on_top: int


@final
class _Runs(dict[tuple[int, int], _Run]):
    """By (start, end). What a stage holds depends on its own layers alone, so stages of one length are asked together:
    those that tile the model, with the one that is missing among them.
    """

    def __init__(self, layers: LayerCosts, split_backward: bool, recomputed: bool) -> None:
        super().__init__()
        self._layers, self._split, self._recomputed = layers, split_backward, recomputed

    def __missing__(self, run: tuple[int, int]) -> _Run:
        start, end = run
        length, num_layers = end - start, self._layers.num_layers
        boundaries = sorted({0, *range(start % length, num_layers + 1, length), num_layers})
        stages = range(len(boundaries) - 1) if self._recomputed else ()
        costs = self._layers.stages(boundaries, split_backward=self._split, recompute=stages)
        for stage, tile in enumerate(pairwise(boundaries)):
            held = costs.activation_bytes[stage]
            kept = costs.checkpoint_bytes[stage] if self._recomputed else held
            peaks = costs.forward_peak_bytes, costs.backward_peak_bytes, costs.weight_peak_bytes
            self[tile] = _Run(costs.static_bytes[stage], kept, held - kept + max(peak[stage] for peak in peaks))
        return self[run]


@lru_cache(_KEPT_TABLES)
def _runs_of(layers: LayerCosts, split_backward: bool, recomputed: bool) -> _Runs:
    return _Runs(layers, split_backward, recomputed)
