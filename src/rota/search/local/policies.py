"""Search over what list scheduling is told: when tasks would like to start, how patient ranks are, what they may hold.

A policy moves whole rows of ops at once, on many ranks, where a move of one op would only make it late.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from rota.search.dispatching import Dispatcher
from rota.search.priorities import busiest_us, from_starts, heads_us
from rota.search.problem import Integers, Orders, Problem
from rota.search.timing import score

OPS_A_DISPATCH = 20  # list scheduling takes as long for an op as a replay for this many

_SPREADS = (1.6, 1.3, 2.0, 1.0, 3.0, 0.7)  # how much longer a micro-batch may take than it has to
_PATIENCES = (2.0, 1.0, 0.5, 0.25, 0.0)

Key = tuple[int, int]  #: the objective, then the other one


@dataclass(frozen=True)
class Policy:
    """Task t would like to start its k-th op at `starts_us[t]` + k · `period_us`; see `Dispatcher` for the rest."""

    starts_us: NDArray[np.float64]
    period_us: float
    patience: float
    limits_bytes: Integers


class Climb:
    """Hill climbing: the best of some plain policies, then whatever is no worse than it."""

    def __init__(self, problem: Problem, is_span: bool, seed: int) -> None:
        self.problem = problem
        self.is_span = is_span
        self.random = np.random.default_rng(seed)
        self.dispatcher = Dispatcher(problem)
        self.steps_bytes = _steps_bytes(problem)
        self.period_us = busiest_us(problem)
        self.plain = self._plain()
        self.policy = next(self._plain())
        self.key: Key | None = None
        self.orders: Orders | None = None

    @property
    def work_a_try(self) -> int:
        """In ops timed."""
        return OPS_A_DISPATCH * int(self.problem.first_op[-1])

    def try_one(self) -> None:
        """The next plain policy; when there are no more, a change of the best."""
        policy = next(self.plain, None) or self._changed()
        priorities = from_starts(self.problem, policy.starts_us, policy.period_us)
        orders = self.dispatcher(priorities, policy.patience, policy.limits_bytes)
        timed = None if orders is None else score(self.problem, orders)
        if timed is None:
            return
        key = (timed.span_us, timed.makespan_us) if self.is_span else (timed.makespan_us, timed.span_us)
        if self.key is None or key <= self.key:
            self.policy, self.key, self.orders = policy, key, orders

    def _plain(self) -> Iterator[Policy]:
        """What nothing waits for comes last of all, or in line."""
        problem = self.problem
        heads = heads_us(problem).astype(np.float64)
        is_read = problem.outputs.first[1:] > problem.outputs.first[:-1]
        last = 4 * heads.max(initial=0) + self.period_us * problem.num_microbatches
        for put_off, spread, patience in product((0.0,) if is_read.all() else (last, 0.0), _SPREADS, _PATIENCES):
            yield Policy(spread * heads + put_off * ~is_read, self.period_us, patience, problem.limits_bytes)

    def _changed(self) -> Policy:
        """Another patience; some neighbouring tasks sooner or later; or one rank may hold more or less."""
        policy, random = self.policy, self.random
        what = random.integers(4)
        if what == 0:
            return replace(policy, patience=max(0.0, policy.patience + 0.3 * random.normal()))
        if what == 1:
            limits = policy.limits_bytes.copy()
            rank = random.integers(len(limits))
            more = self.steps_bytes[rank] * random.integers(-2, 3)
            limits[rank] = min(self.problem.limits_bytes[rank], limits[rank] + more)
            return replace(policy, limits_bytes=limits)
        starts = policy.starts_us.copy()
        first = random.integers(len(starts))
        num_tasks = 1 if what == 2 else random.integers(1, self.problem.placement.num_ranks + 1)
        starts[first : first + num_tasks] += self.period_us * random.normal() * (2 if what == 2 else 1)
        return replace(policy, starts_us=starts)


def _steps_bytes(problem: Problem) -> Integers:
    """The most that one op keeps, on each rank."""
    on = problem.tasks_on
    held = [problem.held_bytes[on.values[a:b]].max(initial=0) for a, b in zip(on.first[:-1], on.first[1:], strict=True)]
    return np.array(held, np.int64)
