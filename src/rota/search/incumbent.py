"""The best plan so far: makespan, then memory; or span, then makespan, then memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rota.search.problem import NO_LIMIT, Integers, Orders, Problem
from rota.search.timing import Tables, peaks, score, start_times
from rota.search.transfer_levels import Transfers, peaks_with_transfers


class Key(NamedTuple):
    """What makes a plan better, most important first."""

    value_us: int
    other_us: int
    peak_bytes: int
    held_bytes: int  #: by all ranks, at their peaks


class Incumbent:
    """Takes candidates and keeps the best one that fits.

    What transfers hold is only known from the times: where it was too much, `most_over_bytes` (int64[num_ranks]) is the
    most by which a limit was exceeded.
    """

    def __init__(self, problem: Problem, of_span: bool, on_better: Callable[[], None]) -> None:
        self.problem = problem
        self.of_span = of_span
        self.orders: Orders | None = None
        self.key: Key | None = None
        self.how = ""
        placement, limits = problem.placement, problem.placement.cluster.limit_bytes
        self.limits_bytes = np.array([NO_LIMIT if limit is None else limit for limit in limits], np.int64)
        self._static_bytes = np.array(placement.static_bytes, np.int64)
        #: Whether some transfer's bytes count on a rank with a limit.
        self.transfers_hold = any(
            route.num_bytes and (limits[route.sender], limits[route.receiver]) != (None, None)
            for route in problem.original.routes
        )
        self._tables = Tables.of(problem)
        self._transfers = Transfers.of(problem)._replace(limits_bytes=np.zeros(placement.num_ranks, np.int64))
        self.most_over_bytes = np.zeros(placement.num_ranks, np.int64)
        self._on_better = on_better

    @property
    def value_us(self) -> int:
        """The makespan or span of the best plan, in µs; there must be one."""
        assert self.key is not None
        return self.key.value_us

    def offer(self, orders: Orders | None, how: str) -> bool:
        """Whether the orders are better, fit, and are kept; `how` names where they come from."""
        timed = None if orders is None else score(self.problem, orders)
        if orders is None or timed is None:
            return False
        held = peaks(self.problem, orders)
        times_us = (timed.span_us, timed.makespan_us) if self.of_span else (timed.makespan_us, 0)
        key = Key(*times_us, int(held.max(initial=0)), int(held.sum()))
        is_better = self.key is None or key < self.key
        if not is_better or (held > self.problem.limits_bytes).any() or not self._transfers_fit(orders):
            return False
        self.orders, self.key, self.how = orders, key, how
        self._on_better()
        return True

    def _transfers_fit(self, orders: Orders) -> bool:
        if not self.transfers_hold:
            return True
        over = np.maximum(self.peaks_bytes(orders) - self.limits_bytes, 0)
        self.most_over_bytes = np.maximum(self.most_over_bytes, over)
        return not over.any()

    def peaks_bytes(self, orders: Orders) -> Integers:
        """int64[num_ranks]: the most that each rank holds at any time, static bytes included."""
        if not self.transfers_hold:
            return peaks(self.problem, orders) + self._static_bytes
        starts_us = start_times(self._tables, orders)
        assert starts_us is not None
        return peaks_with_transfers(self._tables, self._transfers, orders, starts_us) + self._static_bytes
