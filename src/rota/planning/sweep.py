"""All layouts, those with the lowest bounds first, until no bound that is left is below the best plan.

layouts, by bound ─▶ cuts, backward whole or split ─▶ candidates, by bound ─▶ named schedules ─▶ the best plans
        │                          │                        │
        └── cannot be faster       └── does not fit         └── cannot be faster
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from itertools import count
from typing import final

from rota.errors import PlacementError
from rota.planning.candidate import Asked, Candidate
from rota.planning.deadline import Clock
from rota.planning.evaluation import ANY_ORDER, Found, Misfit, evaluate, families, halves, misfit, seconds_of
from rota.planning.layout_bounds import layout_bound_us, placement_bound_us
from rota.planning.layouts import Layout, cuts, is_chain, layouts
from rota.schedules import Family
from rota.stopping import Stopped, look

_KEPT = 24  # of the best plans, each of another kind
_CLOSEST = 6  # of what does not fit, to find out what would

_RESERVED = 0.3  # of the time, for the search of the finalists' orders

_OTHERS = 5  # numbers of ranks and replicas to compare the best with
_OTHERS_TRIED = 200

Heap = list[tuple[int, int, Layout | Candidate]]  # bounds, numbers that decide ties, and what they are of
Kind = tuple[int, int, str, bool]


@final
class Sweep:
    """`run`, then what was found. Deterministic unless the clock ends it."""

    def __init__(self, asked: Asked, clock: Clock) -> None:
        self.asked = asked
        self.clock = clock
        #: By kind the best, the best kinds alone.
        self.found: dict[Kind, Found] = {}
        self.num_layouts = self.num_pruned = self.num_misfits = self.num_left = self.num_plans = 0
        #: No layout's step takes less.
        self.bound_us = 0
        self._numbers = count()
        self._slow: list[tuple[int, int, Candidate, Family]] = []
        self._fitting: set[Layout] = set()
        self._over: set[Layout] = set()
        self._closest: list[tuple[int, int, Misfit]] = []
        self._reserve_s = _RESERVED * clock.seconds

    @property
    def best(self) -> Found | None:
        return min(self.found.values(), key=lambda found: found.key, default=None)

    @property
    def worst_us(self) -> float:
        """What a plan has to be below to be of interest."""
        return float("inf") if self.best is None else self.best.makespan_us

    def run(self) -> None:
        heap: Heap = []
        for rows, layers in self.asked.profiles.items():
            for layout in layouts(
                [rows],
                layers.num_layers,
                self.asked.machine,
                self.asked.batch_rows,
                is_chain=is_chain(layers),
                inference=self.asked.inference,
                recompute=self.asked.may_recompute,
                pipeline_ranks=self.asked.pipeline_ranks,
                copies=self.asked.copies,
            ):
                if not self.clock.has(0.0):
                    break
                heap.append((layout_bound_us(self.asked, layout), next(self._numbers), layout))
        heapify(heap)
        self.bound_us = heap[0][0] if heap else 0
        self.num_layouts = len(heap)
        while heap and heap[0][0] < self.worst_us and self.clock.has(self._reserve_s):
            self._look_at(heap, self.worst_us)
        left = sum(isinstance(item, Layout) for *_, item in heap)
        self.num_pruned = left if heap and heap[0][0] >= self.worst_us else 0
        self.num_left = left - self.num_pruned
        self._try_slow()
        self.num_misfits = len(self._over - self._fitting)
        self._others(heap)

    def _look_at(self, heap: Heap, worst_us: float) -> None:
        bound_us, _, item = heappop(heap)
        if isinstance(item, Layout):
            for candidate_us, candidate in self._candidates(item, bound_us, worst_us):
                heappush(heap, (candidate_us, next(self._numbers), candidate))
        else:
            self._try_families(item, bound_us, worst_us)

    def _others(self, heap: Heap) -> None:
        """Plans that cannot be faster, to be compared with: the most promising on other numbers of ranks."""
        known = {kind[:2] for kind in self.found}
        if self.best is None:
            return
        for bound_us, number, item in sorted(heap, key=lambda entry: entry[:2])[:_OTHERS_TRIED]:
            layout = item if isinstance(item, Layout) else item.layout
            if len(known) >= _OTHERS or not self.clock.left_s > self._reserve_s:
                return
            if (layout.num_ranks, layout.num_replicas) in known:
                continue
            one = [(bound_us, number, item)]
            while one:
                self._look_at(one, math.inf)
            known = {kind[:2] for kind in self.found}

    def _candidates(self, layout: Layout, bound_us: int, worst_us: float) -> list[tuple[int, Candidate]]:
        """With their bounds; those that cannot fit, or cannot be faster, are left out."""
        self._tell(f"{layout.num_ranks} ranks x {layout.num_replicas}, {layout.rows} rows, {layout.shape}")
        made = []
        layers = self.asked.profiles[layout.rows]
        for boundaries in cuts(layers, layout, self.asked.machine):
            if self.clock.left_s <= 0:
                break
            whole = Candidate(self.asked, layout, boundaries, recomputed=frozenset(layout.recomputed))
            for candidate in halves(whole, self.asked.inference):
                try:
                    over = misfit(candidate)
                except PlacementError:  # a shape that is not for these stages
                    continue
                if over is not None:
                    self._over.add(layout)
                    self._remember(over)
                    continue
                us = max(bound_us, placement_bound_us(candidate.placement, layout.num_microbatches))
                if us < worst_us:
                    made.append((us, candidate))
        return made

    def _remember(self, over: Misfit) -> None:
        entry = over.over_bytes, next(self._numbers), over
        self._closest = sorted([*self._closest, entry], key=lambda entry: entry[:2])[:_CLOSEST]

    def _try_families(self, candidate: Candidate, bound_us: int, worst_us: float) -> None:
        for family in families(candidate.layout, self.asked.inference):
            if (family.backward == "split") != candidate.splits_backward:
                continue
            if seconds_of(family, candidate):
                self._slow.append((bound_us, next(self._numbers), candidate, family))
            else:
                self.take(self._evaluated(candidate, family, worst_us))

    def _try_slow(self) -> None:
        """Schedules that are searches themselves, where they may still win."""
        for bound_us, _, candidate, family in sorted(self._slow, key=lambda entry: entry[:2]):
            if bound_us < self.worst_us and self.clock.has(self._reserve_s + seconds_of(family, candidate)):
                self._tell(family.name)
                self.take(self._evaluated(candidate, family, self.worst_us))

    def _evaluated(self, candidate: Candidate, family: Family, worst_us: float) -> Found | Misfit | None:
        """None, too, where the time is over before it is known."""
        try:
            look()
            return evaluate(candidate, family, worst_us)
        except Stopped:
            self.clock.ran_out = True
            return None

    def take(self, result: Found | Misfit | None) -> None:
        """Keep it if it is among the best of its kind."""
        self.num_plans += result is not None
        if isinstance(result, Misfit):
            self._over.add(result.candidate.layout)
            self._remember(result)
        elif result is not None:
            self._fitting.add(result.candidate.layout)
            kind, best_us = kind_of(result), self.worst_us
            if kind not in self.found or result.key < self.found[kind].key:
                self.found[kind] = result
            if len(self.found) > _KEPT:
                del self.found[max(self.found, key=lambda kind: self.found[kind].key)]
            if result.makespan_us < best_us:
                self._tell(result.schedule, at_once=True)

    @property
    def almost_fitting(self) -> list[Candidate]:
        """Those that no named schedule fits on, though another order might."""
        return [over.candidate for _, _, over in self._closest if over.schedule != ANY_ORDER]

    def closest(self) -> Misfit | None:
        """Of all plans the one that is least over the limits, whatever the bounds say; for when nothing fits."""
        found: list[Misfit] = []
        for _, _, over in self._closest:
            every = [candidate := over.candidate]
            if candidate.layout.recompute == "none" and self.asked.may_recompute:
                every.append(candidate.recomputing(range(candidate.layout.num_stages)))
            for one in every:
                for family in families(one.layout, self.asked.inference):
                    result = self._evaluated(one, family, 0) if self.clock.left_s > seconds_of(family, one) else None
                    found += [result] if isinstance(result, Misfit) else []
        return min(found, key=lambda misfit: misfit.over_bytes, default=None)

    def _tell(self, doing: str, at_once: bool = False) -> None:
        best = self.best
        self.clock.tell(doing, self.num_plans, None if best is None else best.makespan_us, at_once)


def kind_of(found: Found) -> Kind:
    """Plans of one kind are variants of the same."""
    layout = found.candidate.layout
    return layout.num_ranks, layout.num_replicas, layout.shape, bool(found.candidate.recomputed)
