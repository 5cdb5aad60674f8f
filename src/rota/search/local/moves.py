"""Local search on the ranks' orders, compiled: move an op of the critical path, time what follows again, keep or undo.

Critical blocks as in Nowicki and Smutnicki, "A Fast Taboo Search Algorithm for the Job Shop Problem", 1996: as long as
the ops that follow each other without a gap on the longest path stay the same blocks with the same ends, nothing gets
faster. So an op moves to the border of its block, or further. Moves are accepted as in Kirkpatrick et al.,
"Optimization by Simulated Annealing", 1983: all that make nothing longer, and fewer and fewer of the others.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rota.compiled import copy, copy_part, inner, int64, loop
from rota.search.dispatching import Memory
from rota.search.problem import Floats, Integers, Orders, Problem, StepEnds
from rota.search.timing import Tables, measure, replay

_NO_LATEST = 1 << 61
_BEYOND = 3  # by how many places an op may leave its block


class State(NamedTuple):
    """Orders and their times, for compiled loops; all functions here keep them consistent."""

    orders: Orders  #: int32[num_ops]
    indexes: Integers  #: int64[num_ops], beside `orders`: which of its task's ops each one is
    #: int64[...]: where in `orders` an op is: of its task's i-th rank, `places[first_place[first_rank[task] + i] + k]`.
    places: Integers
    first_place: Integers  #: int64[len(Tables.ranks) + 1]
    starts_us: Integers  #: int64[num_ops], per node
    kept_us: Integers  #: int64[num_ops]: the same before a move, to go back to
    work_us: Integers  #: int64[num_ranks]
    began: Integers  #: int64[num_tasks]: how many ops of the task were timed when `retime` began …
    started: Integers  #: int64[num_tasks]: … and when it ended
    best: Orders  #: int32[num_ops]
    random: NDArray[np.uint64]  #: uint64[1]: state of the generator

    @classmethod
    def of(cls, problem: Problem, orders: Orders, seed: int) -> State:
        """The state for these orders; `seed` starts the random generator."""
        counts, work_us = problem.counts, problem.counts * problem.durations_us
        sizes = np.repeat(counts, np.diff(problem.ranks.first))
        first_place = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return cls(
            orders=orders.copy(),
            indexes=np.zeros(len(orders), np.int64),
            places=np.zeros(first_place[-1], np.int64),
            first_place=first_place,
            starts_us=np.zeros(problem.first_node[-1], np.int64),
            kept_us=np.zeros(problem.first_node[-1], np.int64),
            work_us=np.array([work_us[tasks].sum() for tasks in problem.tasks_on], np.int64),
            began=np.zeros(len(counts), np.int64),
            started=np.zeros(len(counts), np.int64),
            best=orders.copy(),
            random=np.random.default_rng(seed).integers(1, 1 << 63, 1, np.uint64),
        )


class Goal(NamedTuple):
    """What is minimized, and the best so far."""

    is_span: bool  #: the span, or else the makespan
    best_us: Integers  #: int64[2]: of the best orders, and the other one of makespan and span
    stop_at_us: int  #: what is good enough


@inner
def draw(random: NDArray[np.uint64], below: int) -> int:
    """A whole number from 0 to `below` - 1: Marsaglia's xorshift, 2003, followed by a multiplication."""
    x = random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    random[0] = x
    return int64((x * np.uint64(2685821657736338717) >> np.uint64(33)) % np.uint64(below))


@loop
def anneal(
    tables: Tables,
    step_ends: StepEnds,
    memory: Memory,
    state: State,
    goal: Goal,
    heats_us: Floats,
    most_work: int,
) -> int:
    """Tries moves until `most_work` ops were timed, while the heat goes from the first to the second of `heats_us`.

    Leaves better orders in `state.best` and their values in `goal.best_us`; returns the work done.
    """
    is_span, best_us = goal.is_span, goal.best_us
    orders, first_op = state.orders, tables.first_op
    num_ranks = len(first_op) - 1
    for r in range(num_ranks):
        index(tables, state, r)
    opens = np.zeros(num_ranks, np.int64)
    if is_span:
        opens[tables.num_ranks :] = _NO_LATEST // 2  # a shared link's window is of any length
    retime(tables, state, int64(0), opens, int64(_NO_LATEST))
    settle(tables, state, True)
    current = rate(tables, step_ends, state, is_span)
    blocks, row = np.empty((first_op[-1] + 1, 3), np.int64), orders.copy()
    num_blocks, work = 0, int64(first_op[-1])
    while work < most_work and best_us[0] > goal.stop_at_us:
        work += 20
        if not num_blocks:
            num_blocks = find_blocks(tables, state, is_span, blocks)
            work += first_op[-1] // 20
            if is_span:
                for r in range(tables.num_ranks):
                    opens[r] = start_at(tables, state, first_op[r]) if first_op[r] < first_op[r + 1] else 0
        block = draw(state.random, num_blocks)
        r, first, end = blocks[block, 0], blocks[block, 1], blocks[block, 2]
        rank_first, rank_end = first_op[r], first_op[r + 1]
        at = first + draw(state.random, end - first)
        to = place_for(at, first, end, draw(state.random, int64(3)), draw(state.random, int64(_BEYOND)))
        low = min(at, max(to, rank_first))
        copy_part(orders, row, rank_first, rank_end)
        work += (rank_end - low) // 4
        if not shift(orders, at, min(max(to, rank_first), rank_end - 1)):
            continue
        heat = heats_us[0] + (heats_us[1] - heats_us[0]) * work / most_work
        chance = (1 + draw(state.random, int64(1 << 30))) / (1 << 30)
        most = current[0] + int64(-np.log(chance) * heat)
        is_kept = repair(tables, memory, state, r, low)
        if is_kept:
            since = end_at(tables, state, low - 1) if low > rank_first else int64(0)
            is_timed, num_timed = retime(tables, state, since, opens, most)
            work += num_timed
            value = rate(tables, step_ends, state, is_span) if is_timed else current
            is_kept = is_timed and value[0] <= most
            settle(tables, state, is_kept)
        if not is_kept:
            copy_part(row, orders, rank_first, rank_end)
            continue
        current, num_blocks = value, 0
        index(tables, state, r)
        if current < (best_us[0], best_us[1]):
            best_us[0], best_us[1] = current
            copy(orders, state.best)
    return work


@inner
def rate(tables: Tables, step_ends: StepEnds, state: State, is_span: bool) -> tuple[int, int]:
    """(objective, other one), in µs."""
    makespan, span = measure(tables, step_ends, state.orders, state.starts_us)
    return (span, makespan) if is_span else (makespan, span)


@inner
def index(tables: Tables, state: State, rank: int) -> None:
    """Updates `indexes` and `places` of a rank."""
    counts = np.zeros(len(tables.durations_us), np.int64)
    for at in range(tables.first_op[rank], tables.first_op[rank + 1]):
        task = state.orders[at]
        state.indexes[at] = counts[task]
        for i in range(tables.first_rank[task], tables.first_rank[task + 1]):
            if tables.ranks[i] == rank:
                state.places[state.first_place[i] + counts[task]] = at
        counts[task] += 1


@inner
def start_at(tables: Tables, state: State, at: int) -> int:
    """When the op at place `at` of `orders` starts, in µs."""
    return state.starts_us[tables.first_node[state.orders[at]] + state.indexes[at]]


@inner
def end_at(tables: Tables, state: State, at: int) -> int:
    """When the op at place `at` of `orders` ends, in µs."""
    return start_at(tables, state, at) + tables.durations_us[state.orders[at]]


@inner
def place_for(at: int, first: int, end: int, way: int, beyond: int) -> int:
    """Where the op at `at` goes: to the next place, or to before or after its block."""
    if way == 0:
        return at + 1
    return first - beyond if way == 1 else end - 1 + beyond


@inner
def shift(orders: Orders, at: int, to: int) -> bool:
    """Moves an op, and all ops between by one place; False if that changes nothing."""
    task, step, differs = orders[at], 1 if to > at else -1, False
    for i in range(at, to, step):
        differs |= orders[i + step] != task
    if differs:
        for i in range(at, to, step):
            orders[i] = orders[i + step]
        orders[to] = task
    return differs


@inner
def repair(tables: Tables, memory: Memory, state: State, rank: int, low: int) -> bool:
    """From `low` on, moves ops that free memory forward where memory requires it. False if that is not enough."""
    orders, held_bytes, end = state.orders, memory.held_bytes, tables.first_op[rank + 1]
    done, level = np.zeros(len(tables.durations_us), np.int64), int64(0)
    for i in range(tables.first_op[rank], end):
        if i >= low and not may_follow(tables, memory, rank, orders[i], done, level):
            sooner = i + 1
            while sooner < end and not (
                held_bytes[orders[sooner]] < 0 and may_follow(tables, memory, rank, orders[sooner], done, level)
            ):
                sooner += 1
            if sooner == end:
                return False
            shift(orders, sooner, i)
        done[orders[i]] += 1
        level += held_bytes[orders[i]]
    return True


@inner
def may_follow(tables: Tables, memory: Memory, rank: int, task: int, done: Integers, level: int) -> bool:
    """Whether the task's next op fits, and comes after what it reads on this rank."""
    need = max(memory.held_bytes[task], 0) + memory.peak_bytes[task]
    if level + need > memory.limits_bytes[rank]:
        return False
    for i in range(tables.first_input[task], tables.first_input[task + 1], 2):
        source = tables.inputs[i]
        if done[source] <= done[task]:
            for j in range(tables.first_rank[source], tables.first_rank[source + 1]):
                if tables.ranks[j] == rank:
                    return False
    return True


@inner
def retime(tables: Tables, state: State, since: int, opens_us: Integers, most_us: int) -> tuple[bool, int]:
    """Times all ops from `since` on: (whether all ranks end within `most_us` after `opens_us`, ops timed)."""
    num_ranks, num_timed = len(tables.first_op) - 1, int64(0)
    for task in range(len(tables.durations_us)):
        first, end = tables.first_node[task], tables.first_node[task + 1]
        state.began[task] = started_before(state.kept_us, first, end, since) - first
        state.started[task] = state.began[task]
        num_timed -= state.began[task]
    next_op, free, latest = tables.first_op[:-1].copy(), np.zeros(num_ranks, np.int64), np.empty(num_ranks, np.int64)
    for r in range(num_ranks):
        latest[r] = opens_us[r] + most_us - state.work_us[r]
        for i in range(tables.first_on[r], tables.first_on[r + 1]):
            task = tables.on[i]
            began = state.began[task]
            if began:
                next_op[r] += began
                latest[r] += began * tables.durations_us[task]
                free[r] = max(free[r], state.starts_us[tables.first_node[task] + began - 1] + tables.durations_us[task])
    is_timed = replay(tables, state.orders, next_op, free, latest, state.started, state.starts_us)
    for task in range(len(tables.durations_us)):
        num_timed += state.started[task]
    return is_timed, num_timed


@inner
def started_before(starts_us: Integers, first: int, end: int, since: int) -> int:
    """The first of the rising times from `first` to `end` that is not before `since`; `end` if all are."""
    while first < end:
        middle = (first + end) // 2
        if starts_us[middle] < since:
            first = middle + 1
        else:
            end = middle
    return first


@inner
def settle(tables: Tables, state: State, is_kept: bool) -> None:
    """Keeps the new times, or goes back to the old ones."""
    old, new = (state.kept_us, state.starts_us) if is_kept else (state.starts_us, state.kept_us)
    for task in range(len(tables.durations_us)):
        first = tables.first_node[task] + state.began[task]
        end = tables.first_node[task] + state.started[task]
        copy_part(new, old, first, end)


@inner
def find_blocks(tables: Tables, state: State, is_span: bool, blocks: Integers) -> int:
    """Fills `blocks` with (rank, first, end) of the longest path, last to first, and returns their number."""
    first_op = tables.first_op
    longest, rank = int64(-1), 0
    for r in range(tables.num_ranks):
        if first_op[r] < first_op[r + 1]:
            opens = start_at(tables, state, first_op[r]) if is_span else int64(0)
            window = end_at(tables, state, first_op[r + 1] - 1) - opens
            if window > longest:
                longest, rank = window, r
    num_blocks, at = 0, first_op[rank + 1] - 1
    while at >= 0:
        end = at + 1
        while at > first_op[rank] and end_at(tables, state, at - 1) == start_at(tables, state, at):
            at -= 1
        blocks[num_blocks, 0], blocks[num_blocks, 1], blocks[num_blocks, 2] = rank, at, end
        num_blocks += 1
        rank, at = waited_for(tables, state, at)
    return num_blocks


@inner
def waited_for(tables: Tables, state: State, at: int) -> tuple[int, int]:
    """(rank, place) of what a block's first op waited for: an input or another of its ranks; (-1, -1): nothing."""
    task, k, start = state.orders[at], state.indexes[at], start_at(tables, state, at)
    if start == 0:
        return int64(-1), int64(-1)
    for i in range(tables.first_input[task], tables.first_input[task + 1], 2):
        j = tables.first_rank[tables.inputs[i]]
        place = state.places[state.first_place[j] + k]
        if end_at(tables, state, place) + tables.inputs[i + 1] == start:
            return tables.ranks[j], place
    for j in range(tables.first_rank[task], tables.first_rank[task + 1]):
        place = state.places[state.first_place[j] + k]
        if place > tables.first_op[tables.ranks[j]] and end_at(tables, state, place - 1) == start:
            return tables.ranks[j], place
    return int64(-1), int64(-1)
