"""Orders for a step that offloads: those of the same step without copies, in more memory, with the copies added.

    limit, less what is being copied ──▶ wider limit ──▶ search without copies ──▶ orders ──▶ with copies ──▶ fits?
                                            ▲                                                                  │
                                            └──────────────── wider or narrower, rank by rank ─────────────────┘

How much wider the limit of a rank has to be depends on how many micro-batches are under way to the host or back. So
several widths are tried, and then the best one is changed on some ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from rota.core.copies import with_copies, without_copies
from rota.core.errors import SearchError
from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.core.simulation import simulate
from rota.core.tasks import Kind, scalar
from rota.search.budget import Budget
from rota.search.problem import Problem

_UNDER_WAY = (2.5, 3.0, 2.0, 1.5, 1.0)  # micro-batches of which a copy takes both places
_FACTORS = (0.7, 0.85, 1.15, 1.3)  # of a rank's width
_MOST_RANKS = 3  # whose width is changed at once

#: A search for orders of a problem within a budget, which raises SearchError if nothing fits.
Search: TypeAlias = Callable[[Problem, Budget], Plan]


class Copying:
    """Plans for `placement`, which offloads; `search` finds those without copies. Changes are drawn by `seed`."""

    def __init__(self, placement: Placement, num_microbatches: int, search: Search, seed: int) -> None:
        self._placement, self._num_microbatches, self._search = placement, num_microbatches, search
        self._without = without_copies(placement)
        self._random = np.random.default_rng(seed)
        self._first = [self._widths(under_way) for under_way in _UNDER_WAY]
        self._best: tuple[int, int] | None = None  #: bytes over limits, and µs
        self._best_widths = self._first[0]

    def _widths(self, under_way: float) -> list[float]:
        """By how much more each rank may hold if nothing is offloaded."""
        placement, widths = self._placement, []
        for rank, limit in enumerate(placement.cluster.limit_bytes):
            kept = copied = 0
            for stage in placement.stages_on(rank):
                forward, load = placement.task(stage, Kind.F), placement.task(stage, Kind.L)
                kept += 0 if forward is None else scalar(forward.held_bytes)
                copied += 0 if load is None else scalar(load.held_bytes)
            left = (limit or 0) - placement.static_bytes[rank]
            most = self._num_microbatches * kept / left if left > 0 else 1.0
            widths.append(
                min((1 - under_way * copied / left) * kept / (kept - copied), most)
                if left > 0 and kept > copied
                else most
            )
        return [max(width, 1.0) for width in widths]

    def try_one(self, budget: Budget) -> Plan | None:
        """The plan that one more try finds, or None. It may need more memory than there is."""
        widths = self._first.pop(0) if self._first else self._changed()
        try:
            plan = self._search(self._widened(widths), budget)
        except SearchError:
            return None
        plan = with_copies(plan, self._placement)
        timeline = simulate(plan)
        limits = self._placement.cluster.limit_bytes
        over = [
            max(peak - limit, 0)
            for peak, limit in zip(timeline.peak_memory_bytes, limits, strict=True)
            if limit is not None
        ]
        key = sum(over), timeline.makespan_us
        if self._best is None or key <= self._best:
            self._best, self._best_widths = key, widths
        return plan

    def _changed(self) -> list[float]:
        widths, most = [*self._best_widths], min(_MOST_RANKS, len(self._best_widths))
        ranks = self._random.choice(len(widths), int(self._random.integers(1, most + 1)), replace=False)
        for rank in ranks.tolist():
            widths[rank] = max(widths[rank] * float(self._random.choice(_FACTORS)), 1.0)
        return widths

    def _widened(self, widths: list[float]) -> Problem:
        """The step without copies, with each rank's memory this much larger."""
        cluster, static = self._without.cluster, self._without.static_bytes
        limits = tuple(
            None if limit is None else held + int((limit - held) * width)
            for limit, held, width in zip(cluster.limit_bytes, static, widths, strict=True)
        )
        return Problem(replace(self._without, cluster=replace(cluster, limit_bytes=limits)), self._num_microbatches)
