"""The curve of memory against period: what each byte of a rank's memory buys in time per micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd

from rota.errors import SearchError
from rota.placement import Placement
from rota.search.bounds.memory_bounds import least_memory, period_bound
from rota.search.budget import Budget
from rota.search.periodic.steady_search import SteadyResult, find_steady
from rota.search.problem import Problem
from rota.search.validation import refuse_wrong_curve, refuse_wrong_options, seconds_of
from rota.stopping import ended_by_ctrl_c, guarded, watched

_MOST_POINTS = 64
_HOPE = 0.1  # that a range where both ends are as fast has something better between them


@dataclass(frozen=True)
class Point:
    """With `limit_bytes` on every rank a micro-batch takes `us_per_microbatch`, and no less than `bound_us`."""

    limit_bytes: int
    us_per_microbatch: Fraction
    bound_us: Fraction
    peak_bytes: int  #: of the rank that holds most
    result: SteadyResult


@dataclass(frozen=True)
class Frontier:
    """Points of rising limit, each faster than those before; no steady state within `bounds[i][0]` bytes a rank takes
    less µs a micro-batch than `bounds[i][1]`. `untried`: ranges of limits that the time was too short for.
    """

    points: tuple[Point, ...]
    bounds: tuple[tuple[int, Fraction], ...]
    untried: tuple[tuple[int, int], ...]
    stopped_by: str = ""  #: Ctrl-C, or an error of `progress`

    def to_text(self) -> str:
        """One line a point."""
        lines = ["memory of a rank   time a micro-batch   at least   over the fastest"]
        least = float(self.points[-1].us_per_microbatch)
        for point in self.points:
            us = float(point.us_per_microbatch)
            slower = f"{us / least - 1:.1%}" if least else "-"
            proven = "   the least possible" if point.result.is_optimal else ""
            bound = f"{float(point.bound_us):,.1f}"
            lines.append(f"{point.limit_bytes:>16,}{us:>18,.1f} µs{bound:>11}{slower:>19}{proven}")
        lines += [f"stopped by {self.stopped_by}"] if self.stopped_by else []
        lines += [f"not tried, for lack of time: between {low:,} and {high:,}" for low, high in self.untried]
        return "\n".join(lines)


def find_frontier(
    placement: Placement,
    *,
    time_limit_s: float = 60.0,
    microbatches_per_period: int | None = None,
    seed: int = 0,
    deterministic: bool = False,
    progress: Callable[[Point], None] | None = None,
) -> Frontier:
    """The curve of memory limit against period: from the least memory in which a micro-batch fits to where the busiest
    rank's work is met. The placement's own limits do not count.

    Only limits that ops can reach are tried, most promising first, until nothing can be better or the time is up.
    `microbatches_per_period` None: one and more, as tight memory needs. `deterministic` as in `find_plan`; Ctrl-C
    ends it with the points so far, and so does an error that `progress` raises, of which is warned. Raises SearchError.
    """
    refuse_wrong_curve(placement, microbatches_per_period)
    refuse_wrong_options(seed, progress)
    budget = Budget(seconds_of(time_limit_s), deterministic)
    with ended_by_ctrl_c(budget), watched(lambda: budget.must_stop):
        return _Curve(placement, budget, microbatches_per_period, seed, progress).run()


class _Curve:
    def __init__(
        self,
        placement: Placement,
        budget: Budget,
        microbatches_per_period: int | None,
        seed: int,
        progress: Callable[[Point], None] | None,
    ) -> None:
        self.placement, self.budget, self.seed = placement, budget, seed
        self.progress = guarded(progress, budget)
        self.microbatches_per_period = microbatches_per_period
        self.points: dict[int, Point | None] = {}
        self._bounds: dict[int, Fraction] = {}

    def run(self) -> Frontier:
        limits = self._limits()
        if self._at(limits[-1]) is None:
            if self.budget.stopped_by:
                raise SearchError(f"no steady state was found until it was stopped by {self.budget.stopped_by}")
            raise SearchError(f"no steady state was found with {limits[-1]} bytes a rank; give the search more time")
        untried = self._fill(limits)
        rising: list[Point] = []
        for limit in sorted(self.points):
            point = self.points[limit]
            if point is not None and (not rising or point.us_per_microbatch < rising[-1].us_per_microbatch):
                rising.append(point)
        bounds = tuple((limit, self._bound(limit)) for limit in limits)
        return Frontier(tuple(rising), bounds, tuple(untried), self.budget.stopped_by)

    def _fill(self, limits: list[int]) -> list[tuple[int, int]]:
        """Halves the range that promises most, again and again; those that the time was too short for."""
        ranges = [(0, len(limits) - 1)]
        untried = []
        while ranges:
            low, high = max(ranges, key=lambda ends: self._promise(limits, *ends))
            ranges.remove((low, high))
            if high - low < 2 or not self._promise(limits, low, high):
                continue
            if self.budget.is_over:
                untried.append((limits[low], limits[high]))
                continue
            middle = (low + high) // 2
            self._at(limits[middle])
            ranges += [(low, middle), (middle, high)]
        return sorted(untried)

    def _promise(self, limits: list[int], low: int, high: int) -> float:
        """How much time there may be to save between two limits, times how many there are; 0: nothing."""
        slow, fast = (self._least_us(limits[end]) for end in (low, high))
        least = float(self._bound(limits[high]))
        likely, possible = slow - fast, slow - least
        return max(likely + _HOPE * possible, 0.0) * (high - low) if possible > 0 else 0.0

    def _least_us(self, limit: int) -> float:
        """With at most this limit, of what was found."""
        self._at(limit)
        points = (point for tried, point in self.points.items() if point is not None and tried <= limit)
        return min((float(point.us_per_microbatch) for point in points), default=float("inf"))

    def _limits(self) -> list[int]:
        """From the least in which one micro-batch fits to what the fastest found without a limit holds."""
        unlimited = self._with_limit(None)
        least = max(need.num_bytes for need in least_memory(Problem(unlimited, unlimited.num_components)))
        free = find_steady(unlimited, self._share(), microbatches_per_period=1, seed=self.seed)
        most = max(max(free.steady.most_bytes()) if free is not None else least, least)
        sizes = [size for task in self.placement.tasks for size in (task.held_bytes, task.peak_bytes)]
        step = gcd(*sizes, *(route.num_bytes for route in self.placement.routes)) or 1
        step *= max(-(-(most - least) // step // _MOST_POINTS), 1)
        return [*range(least, most, step), most]

    def _with_limit(self, limit_bytes: int | None) -> Placement:
        cluster = replace(self.placement.cluster, limit_bytes=(limit_bytes,) * self.placement.num_ranks)
        return replace(self.placement, cluster=cluster)

    def _bound(self, limit: int) -> Fraction:
        if limit not in self._bounds:
            self._bounds[limit] = period_bound(self._with_limit(limit))
        return self._bounds[limit]

    def _share(self) -> Budget:
        return self.budget.share(self.budget.seconds / 16)

    def _at(self, limit: int) -> Point | None:
        if limit in self.points:
            return self.points[limit]
        placement = self._with_limit(limit)
        found = find_steady(
            placement, self._share(), microbatches_per_period=self.microbatches_per_period, seed=self.seed
        )
        point = None
        if found is not None:
            bound = self._bound(limit)
            peak = max(found.steady.most_bytes())
            point = Point(limit, found.steady.us_per_microbatch, bound, peak, found)
            self.progress(point)
        self.points[limit] = point
        return point
