"""Local search for plans in which transfers hold memory: orders may exceed the limits on the way, at a price.

What transfers hold depends on times, so that a move on one rank may fill another, and orders that fit can be far apart
with none that fits between them. Simulated annealing (Kirkpatrick et al., 1983) on the value plus a price per byte over
the limits goes through what does not fit. The price rises while nothing fits and falls while something does (strategic
oscillation: Glover, "Heuristics for integer programming using surrogate constraints", 1977).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rota.search.budget import NOMINAL_OPS_PER_S, Budget
from rota.search.compiled import copy, inner, loop
from rota.search.local.moves import draw, shift
from rota.search.problem import Integers, Orders, Problem
from rota.search.timing import Tables, measure, replay
from rota.search.transfer_levels import Transfers, peaks_with_transfers
from rota.stopping import Stopped, look

OPS_PER_RATING = 2  #: rating orders costs as much per op as a replay for this many
_CHUNK = NOMINAL_OPS_PER_S // 40  # ops timed between two looks at the budget
_FIRST_TRIES = 3_000  # moves of the first round; each round has half as many more
_HEATS = (0.8, 0.25, 0.5)  # in turn: by how many mean ops a move may readily lengthen the step at first
_COLDEST = 0.03  # of the first heat, at the end of a round
_NO_LATEST = 1 << 61


class FitState(NamedTuple):
    """Orders and their rating, for compiled loops."""

    orders: Orders  #: int32[num_ops]
    best: Orders  #: int32[num_ops]: the best that fit
    rating: Integers  #: int64[2]: (µs, bytes over the limits) of `orders`
    best_us: Integers  #: int64[1]
    price: NDArray[np.float64]  #: float64[3]: µs per byte over the limits now, at least and at most
    random: NDArray[np.uint64]  #: uint64[1]: state of the generator


def find_fitting(
    problem: Problem,
    starts: Sequence[Orders],
    is_span: bool,
    best_us: int,
    bound_us: int,
    budget: Budget,
    seed: int,
    on_better: Callable[[Orders], bool],
) -> None:
    """Looks for orders that fit with all that transfers hold and last less than `best_us`.

    Args:
        problem: The step; memory reserved in it is not used.
        starts: Orders without cycles to begin with, in turn. They need not fit.
        is_span: Whether the span is minimized, else the makespan.
        best_us: Only what is shorter counts.
        bound_us: No orders are shorter.
        budget: What the search may spend.
        seed: Of all random choices.
        on_better: Called with all that is found.
    """
    search = _Fitting(problem, is_span, best_us, bound_us, budget, seed, on_better)
    with suppress(Stopped):
        turn, tries = 0, _FIRST_TRIES
        while not search.is_over:
            search.round(starts[turn // 2 % len(starts)] if turn % 2 == 0 else None, tries, _HEATS[turn % len(_HEATS)])
            turn, tries = turn + 1, tries * 3 // 2


class _Fitting:
    def __init__(
        self,
        problem: Problem,
        is_span: bool,
        best_us: int,
        bound_us: int,
        budget: Budget,
        seed: int,
        on_better: Callable[[Orders], bool],
    ) -> None:
        self.tables, self.transfers, self.step_ends = Tables.of(problem), Transfers.of(problem), problem.step_ends
        self.is_span, self.bound_us, self.budget, self.on_better = is_span, bound_us, budget, on_better
        self.mean_us = max(float((problem.counts * problem.durations_us).sum() / problem.counts.sum()), 1e-3)
        sizes = np.abs(np.concatenate([problem.held_bytes, [route.num_bytes for route in problem.given.routes]]))
        price = self.mean_us / float(sizes[sizes > 0].mean() if sizes.any() else 1)
        num_ops = int(problem.first_op[-1])
        self.state = FitState(
            np.zeros(num_ops, np.int32),
            np.zeros(num_ops, np.int32),
            np.zeros(2, np.int64),
            np.array([best_us], np.int64),
            np.array([price, price / 50, price * 50]),
            np.random.default_rng(seed).integers(1, 1 << 63, 1, np.uint64),
        )
        self.found = False

    @property
    def is_over(self) -> bool:
        return self.budget.is_over or self.state.best_us[0] <= self.bound_us

    def round(self, start: Orders | None, tries: int, heat: float) -> None:
        """Anneals from `start` (None: from the best, or from where the last round ended), cooling down."""
        if start is not None:
            self.state.orders[:] = start
        elif self.found:
            self.state.orders[:] = self.state.best
        ops, done = OPS_PER_RATING * len(self.state.orders), 0
        chunk = max(_CHUNK // ops, 1)
        while done < tries and not self.is_over:
            look()
            share = min(chunk, tries - done)
            heats = [heat * self.mean_us * _COLDEST ** (part / tries) for part in (done, done + share)]
            before = int(self.state.best_us[0])
            compiled = self.tables, self.transfers, self.step_ends, self.state
            anneal_over(*compiled, self.is_span, np.array(heats), share, self.bound_us)
            done += share
            self.budget.spend_ops(share * ops)
            if self.state.best_us[0] < before:
                self.found = True
                self.on_better(self.state.best.copy())


@loop
def anneal_over(tables, transfers, step_ends, state, is_span, heats_us, num_tries, stop_at_us):  # type: ignore[no-untyped-def]
    """Tries `num_tries` moves, while the heat goes from the first to the second of `heats_us`."""
    orders, first_op, price = state.orders, tables.first_op, state.price
    starts_us, kept = np.zeros(tables.first_node[-1], np.int64), orders.copy()
    value = rate_over(tables, transfers, step_ends, orders, starts_us, is_span, np.inf)
    state.rating[0], state.rating[1] = value
    keep_best(state)
    num_ranks = len(first_op) - 1
    for n in range(num_tries):
        if state.best_us[0] <= stop_at_us:
            return
        r = draw(state.random, num_ranks)
        size = first_op[r + 1] - first_op[r]
        if size < 2:
            continue
        at = draw(state.random, size)
        reach = 1 if draw(state.random, np.int64(2)) else 1 + draw(state.random, size - 1)
        to = at + reach if draw(state.random, np.int64(2)) else at - reach
        to = min(max(to, 0), size - 1)
        if not move(tables, orders, r, first_op[r] + at, first_op[r] + to):
            continue
        heat = heats_us[0] * (heats_us[1] / heats_us[0]) ** (n / num_tries)
        chance = (1 + draw(state.random, np.int64(1 << 30))) / (1 << 30)
        most = state.rating[0] + price[0] * state.rating[1] - np.log(chance) * heat
        value, over = rate_over(tables, transfers, step_ends, orders, starts_us, is_span, most)
        if over < 0 or value + price[0] * over > most:
            copy(kept, orders)
        else:
            state.rating[0], state.rating[1] = value, over
            copy(orders, kept)
            keep_best(state)
        price[0] = min(price[0] * 1.002, price[2]) if state.rating[1] else max(price[0] / 1.002, price[1])


@inner
def keep_best(state):  # type: ignore[no-untyped-def]
    """Keeps the orders if they fit and are better."""
    if state.rating[1] == 0 and state.rating[0] < state.best_us[0]:
        state.best_us[0] = state.rating[0]
        copy(state.orders, state.best)


@inner
def move(tables, orders, rank, at, to):  # type: ignore[no-untyped-def]
    """Moves an op of the rank to where another one is, on all ranks that do both; False if that changes nothing."""
    task, other = orders[at], orders[to]
    k = other_k = 0
    for i in range(tables.first_op[rank], at):
        k += orders[i] == task
    for i in range(tables.first_op[rank], to):
        other_k += orders[i] == other
    if not shift(orders, at, to):
        return False
    for i in range(tables.first_rank[task], tables.first_rank[task + 1]):
        q = tables.ranks[i]
        if q != rank:
            here, there = find(tables, orders, q, task, k), find(tables, orders, q, other, other_k)
            if there >= 0:
                shift(orders, here, there)
    return True


@inner
def find(tables, orders, rank, task, k):  # type: ignore[no-untyped-def]
    """Where the rank does the task's k-th op; -1: nowhere."""
    for i in range(tables.first_op[rank], tables.first_op[rank + 1]):
        if orders[i] == task:
            if k == 0:
                return i
            k -= 1
    return -1


@inner
def rate_over(tables, transfers, step_ends, orders, starts_us, is_span, most):  # type: ignore[no-untyped-def]
    """(µs, bytes over the limits of all ranks); (0, -1) for a cycle, or if this is certainly over `most`."""
    num_ranks = len(tables.first_op) - 1
    next_op, free = tables.first_op[:-1].copy(), np.zeros(num_ranks, np.int64)
    latest, started = np.full(num_ranks, _NO_LATEST), np.zeros(len(tables.durations_us), np.int64)
    if not replay(tables, orders, next_op, free, latest, started, starts_us):
        return np.int64(0), np.int64(-1)
    makespan, span = measure(tables, step_ends, orders, starts_us)
    value = span if is_span else makespan
    if value > most:
        return np.int64(0), np.int64(-1)
    peaks, over = peaks_with_transfers(tables, transfers, orders, starts_us), np.int64(0)
    for r in range(num_ranks):
        over += max(peaks[r] - transfers.limits_bytes[r], 0)
    return value, over
