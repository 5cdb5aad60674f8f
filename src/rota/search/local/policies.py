"""Policies of list scheduling, and a climb over them.

A policy says when tasks would like to start, how patient ranks are, what they may hold, and how many micro-batches may
be between a forward and its backward. Good caps for a chain are those of 1F1B, one less from stage to stage; elsewhere
nobody knows them, so they are climbed over with the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from rota.search.dispatching import NO_CAP, OPS_PER_DISPATCH, Dispatcher, busiest_us, from_starts
from rota.search.problem import NO_LIMIT, Integers, Orders, Problem
from rota.search.timing import score

_SPREADS = (1.6, 1.3, 2.0, 1.0, 3.0, 0.7)  # how much longer a micro-batch may last than it has to
_PATIENCES = (2.0, 1.0, 0.5, 0.25, 0.0)
_ROOMS = (None, 2.0, 1.5, 3.0)  # caps in parts of the micro-batches that fit; None: no caps
_PLAIN_PART = 0.3  # of the tries, as long as there are plain policies

_HEAT = 0.005  # by what part a step may readily become longer at the beginning of a cycle
_FIRST_CYCLE = 300  # tries
_GOOD = 6  # plain policies that are kept

Objectives = tuple[int, int]  #: µs of the objective, then of the other one of makespan and span
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Policy:
    """Task t would like to start its k-th op at `starts_us[t]` + k · `period_us`; see `Dispatcher` for the rest."""

    starts_us: Floats  #: float64[num_tasks]
    period_us: float
    patience: Floats  #: float64[num_ranks]
    limits_bytes: Integers  #: int64[num_ranks]
    caps: Integers  #: int64[num_tasks]


class Climb:
    """Annealing on policies: plain ones, and in between them changes of the best one, or of a good plain one."""

    def __init__(self, problem: Problem, is_span: bool, seed: int) -> None:
        self.problem = problem
        self.is_span = is_span
        self.random = np.random.default_rng(seed)
        self.dispatcher = Dispatcher(problem)
        self.capped = np.flatnonzero(self.dispatcher.memory.backward_of >= 0)
        self.largest_held_bytes = _largest_held_bytes(problem)
        self.period_us = busiest_us(problem)
        self.plain = self._plain()
        self.policy: Policy | None = None  # where the climb is, at a step of `at_us`
        self.at_us: int | None = None
        self.tries, self.cycle, self.cycles = 0, _FIRST_CYCLE, 0
        self.good: list[tuple[int, Policy]] = []  # the best plain ones, from which every other cycle begins
        self.best: Policy | None = None
        self.key: Objectives | None = None
        self.orders: Orders | None = None

    @property
    def ops_per_try(self) -> int:
        """What one try costs, as the number of ops that could be timed instead."""
        return OPS_PER_DISPATCH * int(self.problem.first_op[-1])

    def try_one(self) -> None:
        """Tries the next plain policy, or a change of the best."""
        is_plain = self.policy is None or self.random.random() < _PLAIN_PART
        plain = policy = next(self.plain, None) if is_plain else None
        if policy is None:
            assert self.policy is not None, "there are plain policies"
            policy = self._changed(self.policy)
        priorities = from_starts(self.problem, policy.starts_us, policy.period_us)
        orders = self.dispatcher(priorities, policy.patience, policy.limits_bytes, policy.caps)
        timed = None if orders is None else score(self.problem, orders)
        if timed is None:
            self.policy = self.policy or policy
            return
        key = (timed.span_us, timed.makespan_us) if self.is_span else (timed.makespan_us, timed.span_us)
        if plain is not None:
            self.good = sorted([*self.good, (key[0], plain)], key=lambda pair: pair[0])[:_GOOD]
        chance = 1 - self.random.random()
        if self.at_us is None or key[0] <= self.at_us * (1 - self._heat() * np.log(chance)):
            self.policy, self.at_us = policy, key[0]
        if self.key is None or key <= self.key:
            self.best, self.key, self.orders = policy, key, orders

    def _heat(self) -> float:
        """By how much a step may readily become longer; it falls to 0 in each cycle, and cycles become longer."""
        self.tries += 1
        if self.tries > self.cycle:
            self.tries, self.cycle, self.cycles = 0, self.cycle * 5 // 4, self.cycles + 1
            if self.cycles % 2 and self.good:
                self.at_us, self.policy = self.good[int(self.random.integers(len(self.good)))]
            elif self.key is not None:
                self.at_us, self.policy = self.key[0], self.best
        return _HEAT * (1 - self.tries / self.cycle)

    def _plain(self) -> Iterator[Policy]:
        """Tasks that nothing waits for come last of all, or when their turn comes."""
        problem = self.problem
        heads = problem.heads_us.astype(np.float64)
        is_read = problem.outputs.first[1:] > problem.outputs.first[:-1]
        last = 4 * heads.max(initial=0) + self.period_us * problem.num_microbatches
        all_caps = [self._caps(room) for room in (_ROOMS if len(self.capped) else _ROOMS[:1])]
        put_offs = (0.0,) if is_read.all() else (last, 0.0)
        for put_off, spread, patience, caps in product(put_offs, _SPREADS, _PATIENCES, all_caps):
            patiences = np.full(len(problem.limits_bytes), patience)
            starts = spread * heads + put_off * ~is_read
            yield Policy(starts, self.period_us, patiences, problem.limits_bytes, caps)

    def _caps(self, room: float | None) -> Integers:
        """Caps in proportion to the time between a forward and its backward, `room` times what fits for the longest."""
        problem, capped = self.problem, self.capped
        caps = np.full(len(problem.counts), NO_CAP)
        if room is None:
            return caps
        held = [np.maximum(problem.held_bytes[tasks], 0).sum() for tasks in problem.tasks_on]
        limited = [
            limit / size for limit, size in zip(problem.limits_bytes, held, strict=True) if limit < NO_LIMIT and size
        ]
        fitting = min(limited, default=float(len(held)))
        between_us = problem.heads_us[self.dispatcher.memory.backward_of[capped]] - problem.heads_us[capped]
        parts = between_us / max(between_us.max(initial=0), 1)
        caps[capped] = np.maximum(np.rint(room * fitting * parts), 1)
        return caps

    def _changed(self, policy: Policy) -> Policy:
        """Changes caps, wishes or patience of some neighbours, or what one rank may hold."""
        random = self.random
        what = random.integers(8)
        if what < 3 and len(self.capped):
            return self._with_other_caps(policy)
        if what == 3:
            return self._with_other_patience(policy)
        if what == 4:
            limits = policy.limits_bytes.copy()
            rank = random.integers(len(limits))
            more = self.largest_held_bytes[rank] * random.integers(-2, 3)
            limits[rank] = min(self.problem.limits_bytes[rank], limits[rank] + more)
            return replace(policy, limits_bytes=limits)
        starts = policy.starts_us.copy()
        neighbours = self._neighbours(len(starts))
        starts[neighbours] += self.period_us * random.normal() * random.choice((0.3, 1.0, 3.0))
        return replace(policy, starts_us=starts)

    def _with_other_caps(self, policy: Policy) -> Policy:
        caps = policy.caps.copy()
        tasks = self.capped[self._neighbours(len(self.capped))]
        counts = self.problem.counts[tasks]
        caps[tasks] = np.clip(np.minimum(caps[tasks], counts) + self.random.choice((-2, -1, 1, 2)), 1, counts)
        return replace(policy, caps=caps)

    def _with_other_patience(self, policy: Policy) -> Policy:
        patience = policy.patience.copy()
        ranks = self._neighbours(len(patience)) if self.random.random() < 0.7 else slice(None)
        patience[ranks] = np.maximum(patience[ranks] + 0.4 * self.random.normal(), 0)
        return replace(policy, patience=patience)

    def _neighbours(self, count: int) -> slice:
        """One index below `count`, or as many neighbours as there are ranks at most."""
        first = int(self.random.integers(count))
        is_one = self.random.random() < 0.5
        width = 1 if is_one else int(self.random.integers(1, self.problem.placement.num_ranks + 1))
        return slice(first, first + width)


def _largest_held_bytes(problem: Problem) -> Integers:
    """int64[num_ranks]: the most that one op keeps."""
    return np.array([problem.held_bytes[tasks].max(initial=0) for tasks in problem.tasks_on], np.int64)
