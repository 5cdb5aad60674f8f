"""The states of a step of any length, which states follow each of them, and a table of states.

A *state* is what has begun, what runs, and for how long still. Ops need to start only when another one ends (active
schedules: Giffler and Thompson, "Algorithms for solving production-scheduling problems", 1960), so a step is a path
from state to state, each at the end of an op. Transfers take no time here.

A state's key is one row of numbers: the ops begun of each task; what each rank runs, or -1; for how long still.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rota.compiled import copy, inner, int64, loop
from rota.search.problem import NO_LIMIT, Integers, Problem, Rows

SPARE = 10_000  #: the most choices of a state that are looked at
STATES = 1  #: the place in `meta` where the number of states in a table is counted

Words = NDArray[np.int32]
Bytes = NDArray[np.uint8]


class Step(NamedTuple):
    """What `successors` needs of a problem: its tasks, of which there are always more micro-batches to come."""

    durations_us: Integers  #: int64[num_tasks]
    held_bytes: Integers  #: int64[num_tasks]
    needed_bytes: Integers  #: int64[num_tasks]: free when an op starts
    limits_bytes: Integers  #: int64[num_ranks]
    ranks_first: Integers  #: of the rows of each task's ranks
    ranks: Integers
    sources_first: Integers  #: of the rows of each task's sources
    sources: Integers
    tasks_first: Integers  #: of the rows of each rank's tasks
    tasks: Integers


class Room(NamedTuple):
    """What `successors` works with, made once for many states."""

    of_tasks: Integers  #: int64[2, num_tasks]
    of_ranks: Integers  #: int64[4, num_ranks]
    options: Integers  #: int64[num_ranks, num_tasks + 1]
    children: Words  #: int32[SPARE, ...]: keys of the states that follow
    passed: Integers  #: int64[SPARE]: µs until then


def step_of(problem: Problem, tasks: Sequence[int]) -> Step:
    """The arrays of a problem that has these tasks alone."""
    number = {task: i for i, task in enumerate(tasks)}
    ranks = Rows.of([problem.ranks[task].tolist() for task in tasks])
    sources = Rows.of([[number[s] for s in problem.inputs[t][::2].tolist() if s in number] for t in tasks])
    on = Rows.of([[number[task] for task in row.tolist() if task in number] for row in problem.tasks_on])
    held = problem.held_bytes[[*tasks]]
    return Step(
        problem.durations_us[[*tasks]],
        held,
        np.maximum(held, 0) + problem.peak_bytes[[*tasks]],
        problem.limits_bytes,
        *(ranks.first, ranks.values, sources.first, sources.values, on.first, on.values),
    )


@loop
def _place_of(key: Bytes, mask: int) -> int:
    """Where a key belongs in a table (FNV-1a by words, with its high bits mixed in)."""
    number = np.uint64(1469598103934665603)
    for value in key:
        number = (number ^ np.uint64(value)) * np.uint64(1099511628211)
        number ^= number >> np.uint64(29)
    return int64(number & np.uint64(mask))


@loop
def rehash(keys: Bytes, table: Words, num_states: int) -> None:
    """Fills an empty table."""
    mask = len(table) - 1
    for state in range(num_states):
        at = _place_of(keys[state], mask)
        while table[at] >= 0:
            at = (at + 1) & mask
        table[at] = state


@loop
def find(keys: Bytes, table: Words, meta: Integers, key: Bytes) -> int:
    """The state with this key, which is added if it is new (then its number is the last one)."""
    mask = len(table) - 1
    at = _place_of(key, mask)
    while table[at] >= 0:
        state = table[at]
        same = True
        for i in range(len(key)):
            if keys[state, i] != key[i]:
                same = False
                break
        if same:
            return state
        at = (at + 1) & mask
    state = meta[STATES]
    for i in range(len(key)):
        keys[state, i] = key[i]
    table[at] = state
    meta[STATES] += 1
    return state


@inner
def room_for(step: Step) -> Room:
    """The arrays that `successors` fills."""
    num_tasks, num_ranks = len(step.durations_us), len(step.limits_bytes)
    return Room(
        np.empty((2, num_tasks), np.int64),
        np.empty((4, num_ranks), np.int64),
        np.empty((num_ranks, num_tasks + 1), np.int64),
        np.empty((SPARE, num_tasks + 2 * num_ranks), np.int32),
        np.empty(SPARE, np.int64),
    )


@inner
def successors(key: Words, step: Step, room: Room) -> int:
    """How many states can follow: they are written to `room.children`, and the µs until then to `room.passed`.

    The answer is -1 where there is no room for all of them.
    """
    durations, held, needed, limits, ranks_first, ranks, sources_first, sources, tasks_first, tasks = step
    num_tasks, num_ranks = len(durations), len(limits)
    ended, earliest = room.of_tasks[0], room.of_tasks[1]
    choice, is_free, level, num_options = room.of_ranks[0], room.of_ranks[1], room.of_ranks[2], room.of_ranks[3]
    options, children, passed = room.options, room.children, room.passed
    # What has ended, and what each rank holds.
    for task in range(num_tasks):
        ended[task] = key[task]
    for rank in range(num_ranks):
        level[rank] = 0
        running = key[num_tasks + rank]
        is_free[rank] = running < 0
        if running >= 0 and ranks[ranks_first[running]] == rank:
            ended[running] -= 1
    for rank in range(num_ranks):
        for place in range(tasks_first[rank], tasks_first[rank + 1]):
            task = tasks[place]
            level[rank] += held[task] * (key[task] if held[task] > 0 else ended[task])

    # When the next op of each task can start at the earliest, as far as its inputs say.
    for task in range(num_tasks):
        earliest[task] = 0
        for i in range(sources_first[task], sources_first[task + 1]):
            source = sources[i]
            if ended[source] <= key[task]:
                wait = durations[source]
                if key[source] > key[task] and ended[source] == key[task]:
                    wait = key[num_tasks + num_ranks + ranks[ranks_first[source]]]
                earliest[task] = max(earliest[task], wait)

    # What each idle rank may do; a task of several ranks is an option of the first one.
    total = 1
    for rank in range(num_ranks):
        num_options[rank] = 1
        options[rank, 0] = -1
        choice[rank] = 0
        if not is_free[rank]:
            continue
        for place in range(tasks_first[rank], tasks_first[rank + 1]):
            task = tasks[place]
            if ranks[ranks_first[task]] != rank:
                continue
            can_start = True
            for i in range(sources_first[task], sources_first[task + 1]):
                can_start = can_start and ended[sources[i]] > key[task]
            for i in range(ranks_first[task], ranks_first[task + 1]):
                can_start = can_start and is_free[ranks[i]] != 0 and level[ranks[i]] + needed[task] <= limits[ranks[i]]
            if not can_start:
                continue
            # An op that holds nothing more, and is over before another one could start, has no reason to wait.
            is_best = (held[task] <= 0 or limits[rank] == NO_LIMIT) and ranks_first[task + 1] == ranks_first[task] + 1
            for other in range(tasks_first[rank], tasks_first[rank + 1]):
                if tasks[other] != task:
                    is_best = is_best and earliest[tasks[other]] >= durations[task]
            if is_best:
                options[rank, 0] = task
                num_options[rank] = 1
                break
            options[rank, num_options[rank]] = task
            num_options[rank] += 1
        total *= num_options[rank]

    if total > len(children):
        return int64(-1)
    num_children = 0
    for _ in range(total):
        # The state after these choices.
        child = children[num_children]
        copy(key, child)
        is_possible = True
        for rank in range(num_ranks):
            task = options[rank, choice[rank]]
            if task < 0:
                continue
            for i in range(ranks_first[task], ranks_first[task + 1]):
                is_possible = is_possible and child[num_tasks + ranks[i]] < 0
                child[num_tasks + ranks[i]] = task
                child[num_tasks + num_ranks + ranks[i]] = durations[task]
            child[task] += 1
        for rank in range(num_ranks):  # the next choice
            choice[rank] += 1
            if choice[rank] < num_options[rank]:
                break
            choice[rank] = 0
        if not is_possible:
            continue
        passes = int64(-1)
        for rank in range(num_ranks):
            if child[num_tasks + rank] >= 0:
                still = child[num_tasks + num_ranks + rank]
                passes = still if passes < 0 else min(passes, still)
        if passes < 0:
            continue  # all wait
        for rank in range(num_ranks):
            if child[num_tasks + rank] >= 0:
                child[num_tasks + num_ranks + rank] -= passes
                if child[num_tasks + num_ranks + rank] == 0:
                    child[num_tasks + rank] = -1
        passed[num_children] = passes
        num_children += 1
    return num_children
