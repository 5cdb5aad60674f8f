"""Local search, round after round, each one longer: on the policies of list scheduling, then on the orders themselves.

A change of a policy moves whole rows of ops at once, on many ranks, where moving one op would only make it late.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from rota.core.stopping import Stopped
from rota.search.budget import NOMINAL_OPS_PER_S, Budget
from rota.search.local.moves import Goal, State, anneal
from rota.search.local.policies import Climb, Objectives
from rota.search.problem import Orders
from rota.search.timing import score

_CHUNK = NOMINAL_OPS_PER_S // 20  # ops timed between two looks at the budget
_FIRST_ROUND = 600  # times the ops of the problem: ops timed in the first round's annealing
_CLIMB_PART = 0.5  # of that for policies
_LONG_OPS, _LONG_CLIMB_PART = 20_000, 2.0  # in longer steps a move changes less, and a policy everything
_HEATS = (0.1, 0.3)  # in turn: by how many mean ops a move may readily lengthen the step at first


def improve(climb: Climb, orders: Orders, bound_us: int, budget: Budget, seed: int = 0) -> Orders:
    """The best orders that local search finds until the budget is used up or the objective is at its bound.

    `climb`, to go on with, says what is minimized; where that is equal, the other one of makespan and span counts.
    `orders`, where it begins, fit and have no cycle; so do all orders that are found. Moves are drawn by `seed`.
    """
    search = _Improvement(climb, orders, bound_us, budget, seed)
    with suppress(Stopped):
        search.run()
    return search.best


class _Improvement:
    """Keeps the best orders. Each round tries policies, then anneals the best of them (if it is new) and the best."""

    def __init__(self, climb: Climb, orders: Orders, bound_us: int, budget: Budget, seed: int) -> None:
        problem = climb.problem
        self.climb, self.best, self.bound_us, self.budget = climb, orders, bound_us, budget
        timed = score(problem, orders)
        assert timed is not None
        self.key: Objectives = (
            (timed.span_us, timed.makespan_us) if climb.is_span else (timed.makespan_us, timed.span_us)
        )
        self.mean_us = float((problem.counts * problem.durations_us).sum() / problem.counts.sum())
        self.tables, self.memory = climb.dispatcher.tables, climb.dispatcher.memory
        self.state = State.of(problem, orders, seed)

    @property
    def is_over(self) -> bool:
        return self.key[0] <= self.bound_us or self.budget.is_over

    def run(self) -> None:
        work, turn = _FIRST_ROUND * len(self.best), 0
        climb_part = _CLIMB_PART if len(self.best) <= _LONG_OPS else _LONG_CLIMB_PART
        while not self.is_over:
            before = self.climb.key
            self._climb(climb_part * work)
            heat = _HEATS[turn % len(_HEATS)] * self.mean_us
            climbed = self.climb.key
            if self.climb.orders is not None and climbed is not None and climbed not in (before, self.key):
                self._anneal(self.climb.orders, climbed, work, heat)
            self._anneal(self.best, self.key, work, heat)
            work, turn = 2 * work, turn + 1

    def _climb(self, most_work: float) -> None:
        work = 0
        while work < most_work and not self.is_over:
            self.climb.try_one()
            work += self.climb.dispatcher.ops_of_last_call
            self.budget.spend_ops(self.climb.dispatcher.ops_of_last_call)
            if self.climb.orders is not None and self.climb.key is not None and self.climb.key < self.key:
                self.best, self.key = self.climb.orders, self.climb.key

    def _anneal(self, orders: Orders, key: Objectives, most_work: int, heat: float) -> None:
        """Anneals in chunks, cooling down to 0."""
        state, goal, done = self.state, Goal(self.climb.is_span, np.array(key, np.int64), self.bound_us), 0
        state.orders[:] = state.best[:] = orders
        while done < most_work and not self.is_over:
            share = min(max(_CHUNK, 2 * len(orders)), most_work - done)
            heats = np.array([heat * (1 - work / most_work) for work in (done, done + share)])
            work = anneal(self.tables, self.climb.problem.step_ends, self.memory, state, goal, heats, share)
            done += work
            self.budget.spend_ops(work)
            value_us, other_us = goal.best_us.tolist()
            if (value_us, other_us) < self.key:
                self.best, self.key = state.best.copy(), (value_us, other_us)
