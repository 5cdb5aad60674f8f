"""The best plan so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rota.search.problem import NO_LIMIT, Integers, Orders, Problem
from rota.search.timing import Score, peaks, score
from rota.simulation import simulate
from rota.stopping import look


class Key(NamedTuple):
    """What makes a plan better, first to last."""

    value_us: int
    other_us: int
    peak_bytes: int
    held_bytes: int  #: by all ranks, at their peaks


class Incumbent:
    """Takes candidates and keeps the best that fits.

    By makespan, of equal ones the one that holds least; or by span, then makespan, then memory. What transfers hold is
    only known from the times: where it was too much, `most_over_bytes` says by how much at most.
    """

    def __init__(self, problem: Problem, of_span: bool, on_better: Callable[[], None]) -> None:
        self.problem = problem
        self.of_span = of_span
        self.orders: Orders | None = None
        self.key: Key | None = None
        self.how = ""
        placement = problem.placement
        limits = placement.cluster.limit_bytes
        self._limits_bytes = np.array([NO_LIMIT if limit is None else limit for limit in limits], np.int64)
        #: Whether some transfer's bytes count on a rank with a limit.
        self.transfers_hold = any(route.num_bytes for route in placement.routes)
        self.most_over_bytes = np.zeros(placement.num_ranks, np.int64)
        self._on_better = on_better

    @property
    def value_us(self) -> int:
        assert self.key is not None
        return self.key.value_us

    def offer(self, orders: Orders | None, how: str) -> bool:
        """Whether it is better, and kept."""
        timed = None if orders is None else score(self.problem, orders)
        if orders is None or timed is None:
            return False
        key = self._key(timed, orders)
        if (self.key is not None and key >= self.key) or not self._fits(orders):
            return False
        self.orders, self.key, self.how = orders, key, how
        self._on_better()
        return True

    def _key(self, timed: Score, orders: Orders) -> Key:
        held = peaks(self.problem, orders)
        most, all_ranks = int(held.max(initial=0)), int(held.sum())
        if self.of_span:
            return Key(timed.span_us, timed.makespan_us, most, all_ranks)
        return Key(timed.makespan_us, 0, most, all_ranks)

    def _fits(self, orders: Orders) -> bool:
        if (peaks(self.problem, orders) > self.problem.limits_bytes).any():
            return False
        if not self.transfers_hold:
            return True
        over = self.over_bytes(orders)
        self.most_over_bytes = np.maximum(self.most_over_bytes, over)
        return not over.any()

    def over_bytes(self, orders: Orders) -> Integers:
        """By how much each rank is over its limit."""
        over: Integers = np.maximum(self.peaks_bytes(orders) - self._limits_bytes, 0)
        return over

    def peaks_bytes(self, orders: Orders) -> Integers:
        """The most that each rank holds at any time, static bytes included."""
        placement = self.problem.placement
        if not self.transfers_hold:
            return peaks(self.problem, orders) + np.array(placement.static_bytes, np.int64)
        plan = self.problem.to_plan(orders)
        look()
        timeline = simulate(plan)
        look()
        return np.array(timeline.peak_memory_bytes, np.int64)
