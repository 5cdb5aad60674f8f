"""All states that a step can be in, best first: exact where memory lets few micro-batches be in flight.

A step is a path from state to state (`state_space`). The same state is reached on many ways, of which the fastest is
enough (Held and Karp, "A dynamic programming approach to sequencing problems", 1962). States are taken in the order of
the least time that a whole step through them can have (A*: Hart, Nilsson and Raphael, 1968): the time so far, and the
tail that `bounds` knows for what is still to come.

Micro-batches are in order in each task, so what has begun is one number per task. Memory keeps these numbers close to
each other, so there are about as many new states per micro-batch in a long step as in a short one.

Transfers take no time here; only the tails know them. What this finds is a bound for all plans all the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rota.core.stopping import look
from rota.search.bounds.heads_tails import both_sides, find_heads
from rota.search.bounds.memory_headroom import find_headroom
from rota.search.budget import Budget
from rota.search.compiled import loop
from rota.search.exact.state_space import AT_END, SPARE, TOO_MANY, Words, find, rehash, room_for, step_of, successors
from rota.search.problem import Integers, Orders, Problem, without_common_tasks
from rota.search.transfer_levels import counting_transfers

_MOST_BYTES = 400_000_000  # of all arrays
_FIRST_STATES = 1 << 14
_MOST_BUCKETS = 1 << 22
_POPS_AT_ONCE = 2_000
_S_PER_POP = 6e-6  # nominal seconds, about
_POPPED, _STATES, _ENTRIES, _FREE, _BUCKET, _END = range(6)  #: the columns of `Frontier.meta`
_RUNNING, _FULL, _TOO_MANY, _FINISHED, _EXHAUSTED = range(5)  #: what `_explore` answers


class Tails(NamedTuple):
    """What follows at least: of the step as it is, and of a second kind, with tasks that all ranks share apart."""

    after_us: Integers  #: int64[num_kinds, num_microbatches, num_tasks]: from the end of a task's k-th op
    idle_us: Integers  #: int64[num_kinds, num_microbatches, num_places]: of the place's rank, after the k-th op


class Frontier(NamedTuple):
    """States found so far, and those that are still to be looked at, in buckets by their bound."""

    keys: Words  #: int32[most, num_tasks + 2 num_ranks]: ops begun; what each rank runs, or -1; for how long still
    times_us: Integers  #: int64[most]: the least time at which the state is known to be reached
    parents: Words  #: int32[most]
    table: Words  #: int32[power of 2]: states by hash, or -1
    buckets: Words  #: int32[num_buckets, 2]: the first and the last entry, or -1
    entry_state: Words  #: int32[...]
    entry_us: Integers  #: int64[...]: `times_us` when it was entered
    entry_next: Words  #: int32[...]
    meta: Integers  #: int64[6]


class States:
    """One search, which goes on from turn to turn.

    Attributes:
        bound_us: No plan takes less, as far as is known.
        is_over: Whether going on is of no use: all is proven, or there is no room for more states.
        has_risen: Whether the last turn has raised the bound.
        orders: Of the best step found, once the search has come to an end below the given value.
    """

    def __init__(self, problem: Problem, bound_us: int, value_us: int) -> None:
        """For a makespan of less than `value_us`, where none is less than `bound_us`."""
        self.problem = problem
        self.bound_us, self.first_us, self.value_us = bound_us, bound_us, value_us
        self.orders: Orders | None = None
        counted = counting_transfers(problem)
        self.step, self.tails = step_of(counted), _tails(counted)
        self.width_us = max(1, -(-(value_us - bound_us) // _MOST_BUCKETS))
        width = len(counted.counts) + 2 * counted.placement.num_ranks
        self.frontier = _frontier(width, max(1, -(-(value_us - bound_us) // self.width_us)))
        self.is_over = value_us <= bound_us
        self.has_risen = False
        root = np.zeros(self.frontier.keys.shape[1], np.int32)
        num_tasks, num_ranks = len(self.step.counts), len(self.step.limits_bytes)
        root[num_tasks : num_tasks + num_ranks] = -1
        _enter_first(self.frontier, root)

    def run(self, value_us: int, budget: Budget) -> None:
        """Goes on for a makespan of less than `value_us`, until the budget is used up or nothing is left to be done."""
        self.value_us = min(self.value_us, value_us)
        before_us = self.bound_us
        while not self.is_over and not budget.is_over:
            look()
            before = self.frontier.meta[_POPPED]
            answer = _explore(
                self.step, self.tails, self.frontier, self.first_us, self.width_us, self.value_us, _POPS_AT_ONCE
            )
            budget.spend(_S_PER_POP * int(self.frontier.meta[_POPPED] - before))
            self._take(answer)
        self.has_risen = self.bound_us > before_us

    def _take(self, answer: int) -> None:
        reached_us = self.first_us + int(self.frontier.meta[_BUCKET]) * self.width_us
        if answer == _EXHAUSTED:
            reached_us = self.value_us
        self.bound_us = max(self.bound_us, min(reached_us, self.value_us))
        if answer == _FULL and 2 * sum(array.nbytes for array in self.frontier) <= _MOST_BYTES:
            self.frontier = _grown(self.frontier)
            answer = _RUNNING
        self.is_over = answer != _RUNNING
        if answer == _FINISHED:
            self.orders = self._orders(int(self.frontier.meta[_END]))

    def _orders(self, state: int) -> Orders:
        """The orders of the way to a state: tasks as their ops began."""
        num_tasks = len(self.step.counts)
        rows: list[list[int]] = [[] for _ in self.step.limits_bytes]
        while (parent := int(self.frontier.parents[state])) >= 0:
            begun = self.frontier.keys[state, :num_tasks] - self.frontier.keys[parent, :num_tasks]
            for task in np.flatnonzero(begun).tolist():
                for rank in self.problem.ranks[task].tolist():
                    rows[rank].append(task)
            state = parent
        return np.array([task for row in rows for task in reversed(row)], np.int32)


def _tails(problem: Problem) -> Tails:
    """The heads that `bounds` finds from the end of the step, by how many ops of the task have begun."""
    apart, together_us = without_common_tasks(problem)
    kinds = [problem, apart] if together_us else [problem]
    most, num_tasks = int(problem.counts.max()), len(problem.counts)
    after = np.zeros((len(kinds), most, num_tasks), np.int64)
    idle = np.zeros((len(kinds), most, len(problem.tasks_on.values)), np.int64)
    for i, kind in enumerate(kinds):
        _, last = both_sides(kind)
        heads = find_heads(last, find_headroom(last))
        for task, count in enumerate(kind.counts.tolist()):
            after[i, :count, task] = heads.heads_us[:count, task][::-1]
        for rank, tasks in enumerate(kind.tasks_on):
            first, there = int(problem.tasks_on.first[rank]), problem.tasks_on[rank].tolist()
            assert there == tasks.tolist()
            for place, task in enumerate(last.places[rank].tolist(), int(last.places.first[rank])):
                count = int(kind.counts[task])
                idle[i, :count, first + there.index(task)] = heads.idle_us[:count, place][::-1]
    return Tails(after, idle)


def _frontier(width: int, num_buckets: int) -> Frontier:
    return Frontier(
        np.empty((_FIRST_STATES, width), np.int32),
        np.empty(_FIRST_STATES, np.int64),
        np.empty(_FIRST_STATES, np.int32),
        np.full(4 * _FIRST_STATES, -1, np.int32),
        np.full((num_buckets, 2), -1, np.int32),
        np.empty(2 * _FIRST_STATES, np.int32),
        np.empty(2 * _FIRST_STATES, np.int64),
        np.empty(2 * _FIRST_STATES, np.int32),
        np.array([0, 0, 0, -1, 0, 0], np.int64),
    )


def _grown(frontier: Frontier) -> Frontier:
    """The same with room for twice as many states."""
    table = np.full(2 * len(frontier.table), -1, np.int32)
    rehash(frontier.keys, table, int(frontier.meta[_STATES]))

    def twice(array: Any) -> Any:
        longer = np.empty((2 * len(array), *array.shape[1:]), array.dtype)
        longer[: len(array)] = array
        return longer

    return Frontier(
        twice(frontier.keys),
        twice(frontier.times_us),
        twice(frontier.parents),
        table,
        frontier.buckets,
        twice(frontier.entry_state),
        twice(frontier.entry_us),
        twice(frontier.entry_next),
        frontier.meta,
    )


def _enter_first(frontier: Frontier, root: Words) -> None:
    find(frontier.keys, frontier.table, frontier.meta, root)
    frontier.times_us[0], frontier.parents[0] = 0, -1
    frontier.entry_state[0], frontier.entry_us[0], frontier.entry_next[0] = 0, 0, -1
    frontier.buckets[0], frontier.meta[_ENTRIES] = 0, 1  # first and last of the first bucket


@loop
def _remaining(key, step, tails):  # type: ignore[no-untyped-def]
    """What follows a state at least, in µs."""
    counts, durations, tasks_first, tasks = step.counts, step.durations_us, step.tasks_first, step.tasks
    together, after, idle = step.together_us, tails.after_us, tails.idle_us
    num_tasks, num_ranks = len(counts), len(tasks_first) - 1
    longest = 0
    for kind in range(len(together)):
        apart, most = 0, 0
        for task in range(num_tasks):
            begun = key[task]
            if begun < counts[task]:
                apart += together[kind, task] * (counts[task] - begun)
                most = max(most, durations[task] - together[kind, task] + after[kind, begun, task])
        seen = -1  # a task that all ranks do together runs on all of them
        for rank in range(num_ranks):
            running, still = key[num_tasks + rank], key[num_tasks + num_ranks + rank]
            load, waits = 0, 0
            if running >= 0:
                if together[kind, running]:
                    if seen < 0:
                        apart += still
                    seen = running
                    still = 0
                load = still
                most = max(most, still + after[kind, key[running] - 1, running])
            for place in range(tasks_first[rank], tasks_first[rank + 1]):
                task = tasks[place]
                begun = key[task]
                if begun < counts[task]:
                    load += (durations[task] - together[kind, task]) * (counts[task] - begun)
                    waits = max(waits, idle[kind, begun, place])
                elif task == running:
                    waits = max(waits, idle[kind, begun - 1, place])
            most = max(most, load + waits)
        longest = max(longest, apart + most)
    return longest


@loop
def _explore(step, tails, frontier, first_us, width_us, value_us, pops):  # type: ignore[no-untyped-def]
    """Looks at so many states, those of the least bound first."""
    keys, times, parents, table, buckets, entry_state, entry_us, entry_next, meta = frontier
    room = room_for(step)
    children, passed = room.children, room.passed
    most_buckets = min(len(buckets), (value_us - 1 - first_us) // width_us + 1)
    while pops > 0:
        while meta[_BUCKET] < most_buckets and buckets[meta[_BUCKET], 0] < 0:
            meta[_BUCKET] += 1
        if meta[_BUCKET] >= most_buckets:
            return _EXHAUSTED
        if len(times) - meta[_STATES] < SPARE or len(entry_us) - meta[_ENTRIES] < SPARE:
            return _FULL
        entry = buckets[meta[_BUCKET], 0]
        buckets[meta[_BUCKET], 0] = entry_next[entry]
        state = entry_state[entry]
        now = times[state]
        is_old = entry_us[entry] > now  # entered again since, at an earlier time
        entry_next[entry] = meta[_FREE]
        meta[_FREE] = entry
        if is_old:
            continue
        pops -= 1
        meta[_POPPED] += 1
        key = keys[state]

        found = successors(key, step, room)
        if found == AT_END:
            meta[_END] = state
            return _FINISHED
        if found == TOO_MANY:
            return _TOO_MANY  # choices; the bound stays that of this state's bucket
        for i in range(found):
            child, passes = children[i], passed[i]
            us = now + passes + _remaining(child, step, tails)
            if us >= value_us:
                continue
            states = meta[_STATES]
            other = find(keys, table, meta, child)
            if other < states and times[other] <= now + passes:
                continue
            times[other] = now + passes
            parents[other] = state
            bucket = max(meta[_BUCKET], (us - first_us) // width_us)
            new = meta[_FREE]
            if new >= 0:
                meta[_FREE] = entry_next[new]
            else:
                new = meta[_ENTRIES]
                meta[_ENTRIES] += 1
            entry_state[new], entry_us[new], entry_next[new] = other, now + passes, -1
            if buckets[bucket, 0] < 0:
                buckets[bucket, 0] = new
            else:
                entry_next[buckets[bucket, 1]] = new
            buckets[bucket, 1] = new
    return _RUNNING
