"""The curve of memory against period: the least time per micro-batch for each memory limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd

from rota.core.errors import NothingFitsError
from rota.core.placement import Placement
from rota.core.stopping import ended_by_ctrl_c, guarded, watched
from rota.core.tasks import scalar
from rota.core.text import angle_repr, count_text, exact_size_text, fitted, size_text, table_lines
from rota.search.bounds.memory_bounds import least_memory, period_bound
from rota.search.budget import Budget
from rota.search.periodic.steady import SteadyResult, find_steady
from rota.search.problem import Problem
from rota.search.validation import refuse_wrong_curve, refuse_wrong_progress, seconds_of

_MOST_POINTS = 64
_HOPE = 0.1  # weight of the chance that a range whose ends are equally fast has something better in between


@dataclass(frozen=True)
class Point:
    """What one memory limit allows.

    Attributes:
        limit_bytes: The limit of every rank.
        us_per_microbatch: Time per micro-batch in the best steady state found.
        bound_us: A lower bound for it.
        peak_bytes: Most bytes held, by the rank that holds most.
        result: The steady state.
    """

    limit_bytes: int
    us_per_microbatch: Fraction
    bound_us: Fraction
    peak_bytes: int
    result: SteadyResult


@dataclass(frozen=True)
class Frontier:
    """The curve of memory limit against period.

    Attributes:
        points: Points of rising limit, each faster than those before.
        bounds: (limit in bytes per rank, µs per micro-batch): no steady state within the limit takes less time.
        untried: Ranges of limits in bytes that there was no time for.
        stopped_by: Ctrl-C, or an error of `progress`; empty if the search ended by itself.
    """

    points: tuple[Point, ...]
    bounds: tuple[tuple[int, Fraction], ...]
    untried: tuple[tuple[int, int], ...]
    stopped_by: str = ""

    def __str__(self) -> str:
        """One line."""
        least, most = (size_text(self.points[i].limit_bytes) for i in (0, -1))
        return f"Frontier of {count_text(len(self.points), 'point')}, {least} to {most} per rank"

    __repr__ = angle_repr

    def to_text(self, width: int | None = None) -> str:
        """One line per point, of at most `width` characters; limits are written as `--limit` takes them."""
        rows = []
        least = float(self.points[-1].us_per_microbatch)
        for point in self.points:
            us, bound_us = float(point.us_per_microbatch), float(point.bound_us)
            slower = f"{us / least - 1:.1%}" if least else "-"
            proven = "proven optimal" if point.result.is_optimal else ""
            rows.append((exact_size_text(point.limit_bytes), f"{us:,.1f} µs", f"{bound_us:,.1f} µs", slower, proven))
        header = ("memory per rank", "time per micro-batch", "lower bound", "over the fastest", "")
        lines = table_lines(header, rows, left={""}, width=width, optional=("over the fastest", "lower bound"))
        lines += [f"stopped by {self.stopped_by}"] if self.stopped_by else []
        for low, high in self.untried:
            lines.append(f"not tried, for lack of time: between {exact_size_text(low)} and {exact_size_text(high)}")
        return "\n".join(fitted(line, width) for line in lines)


def find_frontier(
    placement: Placement,
    *,
    time_limit_s: float = 60.0,
    microbatches_per_period: int | None = None,
    deterministic: bool = False,
    progress: Callable[[Point], None] | None = None,
) -> Frontier:
    """The curve of memory limit against period.

    It goes from the least memory that one micro-batch needs to where the busiest rank never idles. Only limits that
    ops can reach are tried, most promising first, until nothing can be better or the time is up. The placement's own
    limits do not count. Ctrl-C ends the search with the points so far.

    Args:
        placement: The tasks of one micro-batch, and the cluster.
        time_limit_s: How long to search, in seconds.
        microbatches_per_period: Of each data stream; None tries one and more, which tight memory needs.
        deterministic: As in `find_plan`.
        progress: Called with each point. An error that it raises ends the search like Ctrl-C, with a warning.

    Returns:
        The points found, and bounds for all limits tried.

    Raises:
        SearchError: An argument is invalid, or no steady state was found.
    """
    refuse_wrong_curve(placement, microbatches_per_period)
    refuse_wrong_progress(progress)
    budget = Budget(seconds_of(time_limit_s), deterministic)
    with ended_by_ctrl_c(budget), watched(lambda: budget.must_stop):
        return _Curve(placement, budget, microbatches_per_period, progress).run()


class _Curve:
    def __init__(
        self,
        placement: Placement,
        budget: Budget,
        microbatches_per_period: int | None,
        progress: Callable[[Point], None] | None,
    ) -> None:
        self.placement, self.budget = placement, budget
        self.progress = guarded(progress, budget)
        self.microbatches_per_period = microbatches_per_period
        self.points: dict[int, Point | None] = {}
        self._bounds: dict[int, Fraction] = {}

    def run(self) -> Frontier:
        limits = self._limits()
        if self._at(limits[-1]) is None:
            if self.budget.stopped_by:
                raise NothingFitsError(
                    f"no steady state was found before the search was stopped by {self.budget.stopped_by}"
                )
            raise NothingFitsError(
                f"no steady state was found with {limits[-1]} bytes per rank; give the search more time"
            )
        untried = self._fill(limits)
        rising: list[Point] = []
        for limit in sorted(self.points):
            point = self.points[limit]
            if point is not None and (not rising or point.us_per_microbatch < rising[-1].us_per_microbatch):
                rising.append(point)
        bounds = tuple((limit, self._bound(limit)) for limit in limits)
        return Frontier(tuple(rising), bounds, tuple(untried), self.budget.stopped_by)

    def _fill(self, limits: list[int]) -> list[tuple[int, int]]:
        """Halves the most promising range, again and again; returns the ranges that there was no time for."""
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
        """How much time could be saved between two limits, times the number of limits between them; 0: nothing."""
        slow, fast = (self._least_us(limits[end]) for end in (low, high))
        least = float(self._bound(limits[high]))
        likely, possible = slow - fast, slow - least
        return max(likely + _HOPE * possible, 0.0) * (high - low) if possible > 0 else 0.0

    def _least_us(self, limit: int) -> float:
        """The least time per micro-batch found with at most this limit."""
        self._at(limit)
        points = (point for tried, point in self.points.items() if point is not None and tried <= limit)
        return min((float(point.us_per_microbatch) for point in points), default=float("inf"))

    def _limits(self) -> list[int]:
        """Limits from the least in which one micro-batch fits to what the fastest found without a limit holds."""
        unlimited = self._with_limit(None)
        least = max(need.num_bytes for need in least_memory(Problem(unlimited, unlimited.num_components)))
        free = find_steady(unlimited, self._share(), microbatches_per_period=1)
        most = max(max(free.steady.most_bytes()) if free is not None else least, least)
        sizes = [size for task in self.placement.tasks for size in (task.held_bytes, task.peak_bytes)]
        sizes += [route.num_bytes for route in self.placement.routes]
        step = gcd(*map(scalar, sizes)) or 1
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
        result = find_steady(placement, self._share(), microbatches_per_period=self.microbatches_per_period)
        point = None
        if result is not None:
            peak_bytes = max(result.steady.most_bytes())
            point = Point(limit, result.steady.us_per_microbatch, self._bound(limit), peak_bytes, result)
            self.progress(point)
        self.points[limit] = point
        return point
