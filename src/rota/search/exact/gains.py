"""A bound from all states that a faster plan would have to come through, where all states are too many.

Each task has a price per unit of time; what runs earns its prices, and time costs a fixed `pace`. A step that is faster
than a bound earns more than it costs. Begun at the right place, such a closed walk through the states (Rota's steps
begin and end with nothing in flight) has earned more than it has cost after each of its edges. So only states on ways
like this are looked at: first those behind an edge that earns more than it costs, and from there on as long as that is
so in sum. If nothing earns more and more, no step is faster.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rota.search.bounds.memory_bounds import matched_bytes
from rota.search.budget import Budget
from rota.search.compiled import inner, loop
from rota.search.exact.rounds import Rounds, pack, unpack
from rota.search.exact.state_space import SPARE, STATES, Step, Words, find, rehash, successors
from rota.search.problem import NO_LIMIT, Integers, Problem
from rota.stopping import look

_MOST_STATES = 1 << 22
_FIRST_STATES = 1 << 16  # a power of 2, as the table needs
_MOST_HALVES = 400_000  # states of one component
_MOST_DURATION = 8  # units of time, each of which is a state
_MOST_COMPONENTS = 2
_MOST_IN_FLIGHT = 8  # micro-batches of one component
_AT_ONCE = 2_000  # states that are followed up between two looks at the clock
_RISE, _LEAST_RISE = 0.04, 0.005  # parts by which the bound is raised each time, at first and at last
_MOST_PASSES = 400
_MOST_EARNED = 64  # units of time that a way may be ahead: more is taken for a walk that earns more and more
_SCALE = 1000  # of prices, so that the pace may be any whole number
_SEEDS_AT_ONCE = 200_000
_S_PER_STATE, _S_PER_SEED = 6e-6, 4e-7  # nominal seconds, about
_RUNNING, _FULL, _FAILED, _FINISHED = range(4)  #: what the loops answer


class Halves(NamedTuple):
    """All states of one component alone, sorted: groups of equal levels, those that earn most first."""

    keys: NDArray[np.int32]  #: int32[num, num_tasks + 2 * num_ranks]
    earns: Integers  #: int64[num]: what runs, per unit of time
    levels: Integers  #: int64[num_groups, num_ranks]
    first: Integers  #: int64[num_groups + 1]


class Gains:
    """One search, which goes on from turn to turn.

    Attributes:
        bound_us: No plan takes less, as far as is known.
        is_over: Whether going on is of no use.
    """

    def __init__(self, problem: Problem, rounds: Rounds) -> None:
        self.rounds, self.step = rounds, rounds.step
        self.bound_us = 0
        self.prices = _prices(problem, rounds)
        counts = problem.counts[rounds.kept]
        self.earned = int((counts * self.prices * self.step.durations_us).sum())  # by a whole step
        self.halves: list[Halves] = []
        self.search: _Search | None = None
        self.target_units = 0
        self.rise = _RISE
        self.is_over = not self._is_promising(problem)

    def _is_promising(self, problem: Problem) -> bool:
        """Whether memory limits what is in flight, and states are few enough to be listed component by component."""
        step, kept = self.step, self.rounds.kept
        return bool(
            kept
            and self.rounds.component_of.max() < _MOST_COMPONENTS
            and step.durations_us.max() <= _MOST_DURATION
            and step.durations_us.min() > 0
            and self.prices.min() > 0
            and all(_is_limited(problem, kept, task) for task in kept if not set(kept) & set(_before(problem, task)))
        )

    def run(self, bound_us: int, value_us: int, budget: Budget) -> None:
        """Tries to prove more than `bound_us` for steps of less than `value_us`, again and again, in this budget."""
        self.bound_us = max(self.bound_us, bound_us)
        if not self.is_over and not self.halves:
            self._enumerate()
        while not self.is_over and not budget.is_over:
            look()
            if self.search is None:
                self._aim(value_us)
            else:
                answer = self.search.go_on(self.step, self.rounds.still_bytes, self.halves, budget)
                if answer == _FULL:
                    self.is_over, self.search = True, None
                elif answer == _FAILED:  # perhaps a steady state is as fast as that
                    self.rise, self.search = self.rise / 2, None
                    self.is_over = self.rise < _LEAST_RISE
                elif answer == _FINISHED:
                    proven = self.rounds.together_us + self.rounds.unit_us * self.target_units
                    self.bound_us, self.search = max(self.bound_us, proven), None

    def _enumerate(self) -> None:
        for component in range(_MOST_COMPONENTS):
            found = _halves(self.step, np.flatnonzero(self.rounds.component_of == component), self.prices)
            if found is None:
                self.is_over = True
                return
            self.halves.append(found)

    def _aim(self, value_us: int) -> None:
        """Begins a search for a proof of a bound that is somewhat higher."""
        known = (self.bound_us - self.rounds.together_us) // self.rounds.unit_us
        most = -(-(value_us - self.rounds.together_us) // self.rounds.unit_us)
        target = min(most, known + max(1, round(self.rise * known)))
        if target <= known:
            self.is_over = True
            return
        # If no closed walk earns more than it costs, T units cost at least what a step earns: pace * T >= earned.
        # So T > target - 1 needs a pace with pace * (target - 1) < earned.
        self.target_units = target
        pace = (self.earned - 1) // (target - 1) if target > 1 else 0
        width = len(self.prices) + (1 + self.rounds.still_bytes) * len(self.step.limits_bytes)
        self.search = _Search(self.rounds.component_of, self.prices, pace, width)


class _Search:
    """One proof: the most that ways to each state have earned above their costs, as negative numbers."""

    def __init__(self, component_of: Integers, prices: Integers, pace: int, width: int) -> None:
        self.component_of, self.prices, self.pace = component_of, prices, pace
        self.keys = np.zeros((_FIRST_STATES, width), np.uint8)
        self.table: Words = np.full(4 * _FIRST_STATES, -1, np.int32)
        self.labels = np.zeros(_FIRST_STATES, np.int64)
        self.is_waiting = np.zeros(_FIRST_STATES, np.bool_)
        self.meta = np.zeros(3, np.int64)
        self.group = np.zeros(4, np.int64)  # where the seeds have got to
        self.has_seeds = False
        self.pending: Integers = np.empty(0, np.int64)
        self.done = self.passes = 0

    def go_on(self, step: Step, still_bytes: int, halves: list[Halves], budget: Budget) -> int:
        """The next part of the work, and how it ended."""
        if len(self.keys) - self.meta[STATES] <= SPARE:
            if 2 * len(self.keys) > _MOST_STATES:
                return _FULL
            self._grow()
        known = (self.keys, self.table, self.labels, self.is_waiting, self.meta)
        if not self.has_seeds:
            before = int(self.meta[STATES])
            one, other = halves
            answer = _seed(
                *one, *other, step.limits_bytes, self.prices, self.pace, *known, self.group, still_bytes, _SEEDS_AT_ONCE
            )
            budget.spend(_S_PER_SEED * (_SEEDS_AT_ONCE + 10 * (int(self.meta[STATES]) - before)))
            self.has_seeds = answer == _FINISHED
            return _RUNNING
        if self.done == len(self.pending):
            self.pending, self.done = np.flatnonzero(self.is_waiting[: self.meta[STATES]]), 0
            self.passes += 1
            if not len(self.pending):
                return _FINISHED
            if self.passes > _MOST_PASSES:
                return _FAILED
        part = self.pending[self.done : self.done + _AT_ONCE]
        done, answer = _follow(*step, self.component_of, self.prices, self.pace, *known, part, still_bytes)
        self.done += done
        budget.spend(_S_PER_STATE * done)
        return int(answer)

    def _grow(self) -> None:
        num_states = int(self.meta[STATES])
        self.keys = np.concatenate([self.keys, np.zeros_like(self.keys)])
        self.labels = np.concatenate([self.labels, np.zeros_like(self.labels)])
        self.is_waiting = np.concatenate([self.is_waiting, np.zeros_like(self.is_waiting)])
        self.table = np.full(2 * len(self.table), -1, np.int32)
        rehash(self.keys, self.table, num_states)


def _prices(problem: Problem, rounds: Rounds) -> Integers:
    """int64[num kept]: bytes that a micro-batch holds while each task runs, on all ranks with a limit.

    Any prices give a true bound; with these, what is not earned is memory that is not used or waits.
    """
    prices = np.zeros(len(problem.counts), np.int64)
    for rank, tasks in enumerate(problem.tasks_on):
        if problem.limits_bytes[rank] != NO_LIMIT:
            matched = matched_bytes(problem, tasks)
            if matched is None:  # a component may hold less than nothing
                return np.zeros(len(rounds.kept), np.int64)
            for source, target, size in matched:
                is_between = (problem.paths_us[source] >= 0) & (problem.paths_us[:, target] >= 0)
                prices[is_between] += size
    kept: Integers = _SCALE * prices[rounds.kept]
    return kept


def _before(problem: Problem, task: int) -> list[int]:
    sources: list[int] = problem.inputs[task].reshape(-1, 2)[:, 0].tolist()
    return sources


def _is_limited(problem: Problem, kept: list[int], first: int) -> bool:
    """Whether a first task holds its bytes until a task that comes after all of its component.

    Then no task of the component can be further behind this one than there is room for in its rank's memory.
    """
    rank = int(problem.ranks[first][0])
    held, limit = int(problem.held_bytes[first]), int(problem.limits_bytes[rank])
    if held <= 0 or limit // held > _MOST_IN_FLIGHT:
        return False
    component = [t for t in kept if problem.component_of[t] == problem.component_of[first]]
    matched = matched_bytes(problem, problem.tasks_on[rank]) or ()
    return any(
        source == first and size == held and all(problem.paths_us[t, last] >= 0 for t in component)
        for source, last, size in matched
    )


def _most_in_flight(step: Step, task: int) -> int:
    rank = int(step.ranks[step.ranks_first[task]])
    held = int(step.held_bytes[task])
    return int(step.limits_bytes[rank]) // held if held > 0 else NO_LIMIT


def _halves(step: Step, tasks: Integers, prices: Integers) -> Halves | None:
    """All states of these tasks, a component; None if there are too many. Not all of them can be reached."""
    num_tasks, num_ranks = len(step.counts), len(step.limits_bytes)
    rows = np.zeros((1, num_tasks + 2 * num_ranks), np.int32)
    rows[:, num_tasks : num_tasks + num_ranks] = -1
    ended = np.zeros((1, num_tasks), np.int32)
    most = max((_most_in_flight(step, t) for t in tasks.tolist() if not len(_sources(step, t))), default=0)
    left = set(tasks.tolist())
    while left:
        look()
        task = next(t for t in sorted(left) if not left & set(_sources(step, t)))
        left.remove(task)
        ranks = step.ranks[step.ranks_first[task] : step.ranks_first[task + 1]]
        sources = _sources(step, task)
        limit = ended[:, sources].min(axis=1) if sources else np.full(len(rows), most)
        is_free = (rows[:, num_tasks + ranks] < 0).all(axis=1)
        found, found_ended = [], []
        for begun in range(most + 1):
            for still in range(int(step.durations_us[task]) + 1):
                chosen = (limit >= begun) & (is_free | (still == 0))
                more, more_ended = rows[chosen], ended[chosen]
                more[:, task], more_ended[:, task] = begun, begun - (still > 0)
                if still:
                    more[:, num_tasks + ranks], more[:, num_tasks + num_ranks + ranks] = task, still
                found.append(more)
                found_ended.append(more_ended)
        rows, ended = np.concatenate(found), np.concatenate(found_ended)
        if len(rows) > _MOST_HALVES:
            return None
    levels = np.zeros((len(rows), num_ranks), np.int64)
    for task in tasks.tolist():
        held = int(step.held_bytes[task])
        for rank in step.ranks[step.ranks_first[task] : step.ranks_first[task + 1]].tolist():
            levels[:, rank] += held * (rows[:, task] if held > 0 else ended[:, task])
    is_state = (levels <= step.limits_bytes).all(axis=1)
    if len(tasks):
        is_state &= rows[:, tasks].min(axis=1) == 0
    rows, ended, levels = rows[is_state], ended[is_state], levels[is_state]
    earns = ((rows[:, :num_tasks] - ended) * prices).sum(axis=1).astype(np.int64)
    groups, group_of = np.unique(levels, axis=0, return_inverse=True)
    order = np.lexsort((-earns, group_of.ravel()))
    first = np.concatenate([[0], np.cumsum(np.bincount(group_of.ravel(), minlength=len(groups)))]).astype(np.int64)
    return Halves(rows[order], earns[order], groups.astype(np.int64), first)


def _sources(step: Step, task: int) -> list[int]:
    row: list[int] = step.sources[step.sources_first[task] : step.sources_first[task + 1]].tolist()
    return row


@inner
def _improve(child, cost, num_tasks, num_ranks, still_bytes, packed, keys, table, labels, is_waiting, meta):  # type: ignore[no-untyped-def]
    """Lowers the label of a state."""
    pack(child, num_tasks, num_ranks, still_bytes, packed)
    state = find(keys, table, meta, packed)
    if cost < labels[state]:
        labels[state] = cost
        is_waiting[state] = True


@loop
def _seed(  # type: ignore[no-untyped-def]
    one_keys,
    one_earns,
    one_levels,
    one_first,
    other_keys,
    other_earns,
    other_levels,
    other_first,
    limits,
    prices,
    pace,
    keys,
    table,
    labels,
    is_waiting,
    meta,
    group,
    still_bytes,
    most,
):
    """Goes on with the states behind edges that earn more than they cost; `group` is where this has got to."""
    num_tasks, num_ranks = len(prices), len(limits)
    key, packed = np.empty(num_tasks + 2 * num_ranks, np.int32), np.empty(keys.shape[1], np.uint8)
    while group[0] < len(one_levels):
        fits = True
        for rank in range(num_ranks):
            fits = fits and one_levels[group[0], rank] + other_levels[group[1], rank] <= limits[rank]
        one, last = one_first[group[0]] + group[2], one_first[group[0] + 1]
        other_begins, other_ends = other_first[group[1]], other_first[group[1] + 1]
        while fits and one < last and one_earns[one] + other_earns[other_begins] > pace:
            if most <= 0:
                group[2] = one - one_first[group[0]]
                return _RUNNING
            other = other_begins + group[3]
            while other < other_ends and one_earns[one] + other_earns[other] > pace:
                if len(keys) - meta[STATES] <= 1:
                    group[2], group[3] = one - one_first[group[0]], other - other_begins
                    return _RUNNING
                most -= 1
                is_possible, passes = True, np.int32(0)
                for task in range(num_tasks):
                    key[task] = one_keys[one, task] + other_keys[other, task]
                for rank in range(num_ranks):
                    at = num_tasks + rank
                    is_possible = is_possible and (one_keys[one, at] < 0 or other_keys[other, at] < 0)
                    key[at] = max(one_keys[one, at], other_keys[other, at])
                    still = max(one_keys[one, at + num_ranks], other_keys[other, at + num_ranks])
                    key[at + num_ranks] = still
                    if still > 0 and (passes == 0 or still < passes):
                        passes = still
                if is_possible and passes > 0:
                    for rank in range(num_ranks):
                        at = num_tasks + rank
                        if key[at] >= 0:
                            key[at + num_ranks] -= passes
                            if key[at + num_ranks] == 0:
                                key[at] = -1
                    cost = (pace - one_earns[one] - other_earns[other]) * passes
                    _improve(
                        key, cost, num_tasks, num_ranks, still_bytes, packed, keys, table, labels, is_waiting, meta
                    )
                other += 1
            group[3] = 0
            one += 1
        group[2] = 0
        group[1] += 1
        if group[1] == len(other_levels):
            group[1] = 0
            group[0] += 1
    return _FINISHED


@loop
def _follow(  # type: ignore[no-untyped-def]
    counts,
    durations,
    held,
    needed,
    limits,
    ranks_first,
    ranks,
    sources_first,
    sources,
    tasks_first,
    tasks,
    _,
    component_of,
    prices,
    pace,
    keys,
    table,
    labels,
    is_waiting,
    meta,
    pending,
    still_bytes,
):
    """(number of states that were followed up, what happened)."""
    num_tasks, num_ranks = len(counts), len(limits)
    scratch_of_tasks, scratch_of_ranks = np.empty((2, num_tasks), np.int64), np.empty((4, num_ranks), np.int64)
    options = np.empty((num_ranks, num_tasks + 1), np.int64)
    children, passed = np.empty((SPARE, num_tasks + 2 * num_ranks), np.int32), np.empty(SPARE, np.int64)
    key, packed = np.empty(num_tasks + 2 * num_ranks, np.int32), np.empty(keys.shape[1], np.uint8)
    complete = np.empty(_MOST_COMPONENTS, np.int32)
    for i in range(len(pending)):
        state = pending[i]
        if len(keys) - meta[STATES] <= SPARE:
            return i, _RUNNING
        is_waiting[state] = False
        unpack(keys[state], num_tasks, num_ranks, still_bytes, key)
        found = successors(
            key,
            counts,
            durations,
            held,
            needed,
            limits,
            ranks_first,
            ranks,
            sources_first,
            sources,
            tasks_first,
            tasks,
            scratch_of_tasks,
            scratch_of_ranks,
            options,
            children,
            passed,
        )
        if found < 0:
            return i, _FAILED
        for j in range(found):
            child = children[j]
            cost = labels[state] + pace * passed[j]
            for task in range(num_tasks):
                cost -= prices[task] * durations[task] * (child[task] - key[task])
            for rank in range(num_ranks):
                for sign in range(2):
                    row = child if sign else key
                    task = row[num_tasks + rank]
                    if task >= 0 and ranks[ranks_first[task]] == rank:
                        still = prices[task] * row[num_tasks + num_ranks + rank]
                        cost += still if sign else -still
            if cost >= 0:
                continue
            if cost < -_MOST_EARNED * pace:
                return i, _FAILED
            for task in range(num_tasks):
                if child[task] > 250:
                    return i, _FAILED
            for component in range(_MOST_COMPONENTS):
                complete[component] = 255
            for task in range(num_tasks):
                complete[component_of[task]] = min(complete[component_of[task]], child[task])
            for task in range(num_tasks):
                child[task] -= complete[component_of[task]]
            _improve(child, cost, num_tasks, num_ranks, still_bytes, packed, keys, table, labels, is_waiting, meta)
    return len(pending), _RUNNING
