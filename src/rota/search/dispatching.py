"""List scheduling: a free rank starts, of the ops whose inputs are there and that fit, the one of best priority.

Graham, "Bounds on Multiprocessing Timing Anomalies", 1969. A rank may also wait for a better op that is due soon, as in
Giffler and Thompson, "Algorithms for Solving Production-Scheduling Problems", 1960: that keeps all good orders within
reach. Memory is granted as by Dijkstra's banker ("Cooperating Sequential Processes", 1965): an op that takes memory
starts only if after it each rank can still finish its micro-batches one by one, oldest first. Then nothing gets stuck,
unless what micro-batches leave behind for good fills the memory in an unlucky order.

Good priorities are the times at which ops would start in an ideal steady state: `guesses`.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rota.search.problem import NO_LIMIT, Integers, Orders, Problem, Rows
from rota.search.timing import Tables
from rota.stopping import look

Priorities = NDArray[np.float64]  #: float64[num_ops]: per node, the lowest goes first

OPS_PER_DISPATCH = 20  #: list scheduling costs as much per op as a replay costs for this many

_MOST_STATES = 10_000  # tried to find the one order of a micro-batch that needs least memory
_NEVER = 1 << 61
_OPS_PER_CALL = 20_000  # of the compiled loop, which cannot be interrupted

#: Overflow, tasks left, a number, the set of tasks done, levels, tasks that can follow, tasks done in order.
_PartialOrder = tuple[int, int, int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class Memory(NamedTuple):
    """What the banker knows, for compiled loops."""

    limits_bytes: Integers  #: int64[num_ranks], or NO_LIMIT
    held_bytes: Integers  #: int64[num_tasks]
    peak_bytes: Integers  #: int64[num_tasks]
    first_row: Integers  #: int64[num_ranks * num_components + 1], as in `Rows`
    #: int64[...]: row r * num_components + c has rank r's tasks of component c, in the order of `one_at_a_time`.
    rows: Integers
    component_of: Integers  #: int64[num_tasks]

    @classmethod
    def of(cls, problem: Problem) -> Memory:
        """The tables of a problem."""
        placement, order = problem.placement, one_at_a_time(problem)
        tasks, component_of = placement.tasks, placement.component_of
        pairs = ((rank, c) for rank in range(placement.num_ranks) for c in range(placement.num_components))
        rows = Rows.of([[t for t in order if r in tasks[t].ranks and component_of[t] == c] for r, c in pairs])
        components = np.array(component_of, np.int64)
        return cls(problem.limits_bytes, problem.held_bytes, problem.peak_bytes, rows.first, rows.values, components)


class DispatchState(NamedTuple):
    """How far a dispatch is, for compiled loops. Micro-batches are numbered as in the plan."""

    orders: Orders  #: int32[num_ops]
    next_op: Integers  #: int64[num_ranks]: where in `orders` the rank's next op goes
    free_us: Integers  #: int64[num_ranks]: when the rank is free
    wake_us: Integers  #: int64[num_ranks]: when to look at the rank again
    started: Integers  #: int64[num_tasks]: how many ops of the task have started
    ends_us: Integers  #: int64[num_ops], per node
    levels: Integers  #: int64[num_ranks]: bytes held
    oldest: Integers  #: int64[num_ranks]: the rank has finished all micro-batches before this one
    newest: Integers  #: int64[num_ranks]: the last micro-batch that the rank has begun, -1: none
    due_us: Integers  #: int64[num_tasks]: when the task's next op could start

    @classmethod
    def of(cls, tables: Tables) -> DispatchState:
        """The state before the first op."""

        def zeros(size: int) -> Integers:
            return np.zeros(size, np.int64)

        num_ranks, num_tasks = len(tables.first_op) - 1, len(tables.durations_us)
        return cls(
            np.zeros(tables.first_op[-1], np.int32),
            tables.first_op[:-1].copy(),
            zeros(num_ranks),
            zeros(num_ranks),
            zeros(num_tasks),
            zeros(tables.first_node[-1]),
            zeros(num_ranks),
            zeros(num_ranks),
            np.full(num_ranks, -1),
            zeros(num_tasks),
        )


class Dispatcher:
    """Makes orders of a problem from priorities, many times."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tables = Tables.of(problem)
        self.memory = Memory.of(problem)

    def __call__(
        self, priorities: Priorities, patience: float = 0.0, limits_bytes: Integers | None = None
    ) -> Orders | None:
        """The orders, or None where memory lets nothing more start.

        Args:
            priorities: float64[num_ops], per node; the lowest goes first.
            patience: A rank waits for a better op rather than start a worse one that would delay it, if it idles less
                than `patience` times that delay.
            limits_bytes: int64[num_ranks], lower than the problem's limits to keep fewer micro-batches in flight.
        """
        memory = self.memory if limits_bytes is None else self.memory._replace(limits_bytes=limits_bytes)
        state = DispatchState.of(self.tables)
        while run(self.tables, memory, priorities, patience, state, _OPS_PER_CALL):
            look()
        num_started = int((state.next_op - self.tables.first_op[:-1]).sum())
        return state.orders if num_started == self.tables.first_op[-1] else None


def serial(problem: Problem) -> Orders:
    """One micro-batch at a time, in the order that exceeds the limits least."""
    order, placement = one_at_a_time(problem), problem.placement
    rows: list[list[int]] = [[] for _ in range(placement.num_ranks)]
    for microbatch in range(problem.num_microbatches):
        for task in order:
            if placement.component_of[task] == microbatch % placement.num_components:
                for rank in placement.tasks[task].ranks:
                    rows[rank].append(task)
    return np.array([task for row in rows for task in row], np.int32)


def one_at_a_time(problem: Problem) -> tuple[int, ...]:
    """The tasks of one micro-batch in the order that minimizes the most that any rank holds over its limit.

    Dijkstra's algorithm over the sets of tasks done, where the largest step counts, not the sum. After `_MOST_STATES`
    sets, only the best one is followed.
    """
    tasks, limits = problem.placement.tasks, problem.limits_bytes.tolist()
    outputs: list[list[int]] = [[] for _ in tasks]
    needs = [0] * len(tasks)  # sets of tasks are bits
    for source, target in problem.lags_us:
        outputs[source].append(target)
        needs[target] |= 1 << source
    roots = tuple(task for task in problem.topological if not needs[task])
    nothing_over, tie_breaker = -2 * NO_LIMIT, count()
    heap: list[_PartialOrder] = [(nothing_over, 0, 0, 0, (0,) * len(limits), roots, ())]
    seen: set[int] = set()
    while True:
        over, _, _, done, levels, ready, order = heappop(heap)
        if not ready:
            return order
        if done in seen:
            continue
        seen.add(done)
        if len(seen) > _MOST_STATES:
            heap.clear()
        overs = {}
        for t in ready:
            need = max(tasks[t].held_bytes, 0) + tasks[t].peak_bytes
            overs[t] = max(over, *(levels[rank] + need - limits[rank] for rank in tasks[t].ranks))
        harmless = [t for t in ready if tasks[t].held_bytes <= 0 and overs[t] <= over]  # doing it later is no better
        for t in harmless[:1] or ready:
            now_done = done | 1 << t
            after = list(levels)
            for rank in tasks[t].ranks:
                after[rank] += tasks[t].held_bytes
            now_ready = [o for o in outputs[t] if not needs[o] & ~now_done] + [other for other in ready if other != t]
            state = now_done, tuple(after), tuple(now_ready), (*order, t)
            heappush(heap, (overs[t], -len(state[-1]), next(tie_breaker), *state))


def from_starts(problem: Problem, starts_us: NDArray[np.float64], period_us: float) -> Priorities:
    """Task t would start its k-th micro-batch at `starts_us[t]` + k · `period_us`; `starts_us`: float64[num_tasks]."""
    task_of = problem.task_of
    nth = np.arange(len(task_of)) - problem.first_node[task_of]
    return starts_us[task_of] + nth * period_us


def guesses(problem: Problem) -> Iterator[Priorities]:
    """Priorities from ideal steady states without ranks: each task as early as its micro-batch allows, or as late.

    Tasks that nothing reads (weight gradients) come when their turn comes, a period later, or last of all.
    """
    heads, tails = problem.heads_us, problem.tails_us + problem.durations_us
    whole = float((heads + tails).max(initial=0))
    period = busiest_us(problem)
    read_by_none = problem.outputs.first[1:] == problem.outputs.first[:-1]
    for put_off in (0.0, period, 4 * whole + period * problem.num_microbatches):
        for pace in (1.0, 0.5, 0.0):  # 0: what is deepest in the pipeline goes first
            for early in (True, False):
                starts = (heads if early else whole - tails).astype(np.float64)
                if pace == 0:
                    starts = -starts
                starts = starts + put_off * read_by_none
                yield from_starts(problem, starts, period * pace if pace else 1e-3)


def busiest_us(problem: Problem) -> float:
    """Work of the busiest rank for one micro-batch of each component in µs; 1 where nothing lasts."""
    return float(max(problem.durations_us[tasks].sum() for tasks in problem.tasks_on)) or 1.0


@njit(cache=True, nogil=True)
def run(tables, memory, priorities, patience, state, most_ops):  # type: ignore[no-untyped-def]
    """Starts `most_ops` ops; False when no ops are left, or memory lets nothing start."""
    _, first_node, durations, first_rank, ranks, _, _, first_output, outputs, first_on, on, _ = tables
    orders, next_op, free_us, wake_us, started, ends_us, levels, oldest, newest, due_us = state
    num_ranks = len(free_us)
    num_components = (len(memory.first_row) - 1) // num_ranks
    num_ops = 0
    while True:
        rank = np.argmin(wake_us)
        now = wake_us[rank]
        if now == _NEVER:
            return False
        if num_ops == most_ops:
            return True
        if free_us[rank] > now:
            wake_us[rank] = free_us[rank]
            continue
        chosen = -1
        wake_us[rank] = _NEVER
        for i in range(first_on[rank], first_on[rank + 1]):
            task = on[i]
            due_us[task] = due(tables, task, started, ends_us, free_us)
            if due_us[task] < _NEVER:
                for j in range(first_rank[task], first_rank[task + 1]):
                    if not admits(memory, ranks[j], task, started, levels, oldest, newest, num_components):
                        due_us[task] = _NEVER
                        break
        for i in range(first_on[rank], first_on[rank + 1]):
            task = on[i]
            if due_us[task] > now:
                wake_us[rank] = min(wake_us[rank], due_us[task])
                continue
            priority = priorities[first_node[task] + started[task]]
            if chosen >= 0 and priority >= priorities[first_node[chosen] + started[chosen]]:
                continue
            end = now + durations[task]
            is_better_to_wait = False
            for j in range(first_on[rank], first_on[rank + 1]):
                other = on[j]
                if now < due_us[other] < end and priorities[first_node[other] + started[other]] < priority:
                    is_better_to_wait |= due_us[other] - now < patience * (end - due_us[other])
            if not is_better_to_wait:
                chosen = task
        if chosen < 0:
            continue
        num_ops += 1
        k, end = started[chosen], now + durations[chosen]
        ends_us[first_node[chosen] + k] = end
        started[chosen] += 1
        for j in range(first_rank[chosen], first_rank[chosen + 1]):
            q = ranks[j]
            orders[next_op[q]] = chosen
            next_op[q] += 1
            free_us[q] = wake_us[q] = end
            levels[q] += memory.held_bytes[chosen]
            newest[q] = max(newest[q], k * num_components + memory.component_of[chosen])
        for i in range(first_output[chosen], first_output[chosen + 1], 2):
            fed = outputs[i]
            for j in range(first_rank[fed], first_rank[fed + 1]):
                q = ranks[j]
                wake_us[q] = min(wake_us[q], end + outputs[i + 1])


@njit(cache=True, nogil=True)
def due(tables, task, started, ends_us, free_us):  # type: ignore[no-untyped-def]
    """When the task's next op could start: its inputs are there, its ranks free. _NEVER if that is not known yet."""
    k = started[task]
    if k == tables.first_node[task + 1] - tables.first_node[task]:
        return _NEVER
    at = np.int64(0)
    for i in range(tables.first_input[task], tables.first_input[task + 1], 2):
        source = tables.inputs[i]
        if started[source] <= k:
            return _NEVER
        at = max(at, ends_us[tables.first_node[source] + k] + tables.inputs[i + 1])
    for i in range(tables.first_rank[task], tables.first_rank[task + 1]):
        at = max(at, free_us[tables.ranks[i]])
    return at


@njit(cache=True, nogil=True)
def admits(memory, rank, task, started, levels, oldest, newest, num_components):  # type: ignore[no-untyped-def]
    """Whether the task's next op fits on the rank, and after it the rest of the rank's micro-batches one by one."""
    limit, held_bytes, peak_bytes = memory.limits_bytes[rank], memory.held_bytes, memory.peak_bytes
    held = held_bytes[task]
    if levels[rank] + max(held, 0) + peak_bytes[task] > limit:
        return False
    if held <= 0 or limit == NO_LIMIT:
        return True
    level = levels[rank] + held
    started[task] += 1
    is_safe, is_oldest = True, True
    last = max(newest[rank], (started[task] - 1) * num_components + memory.component_of[task])
    for microbatch in range(oldest[rank], last + 1):
        component, k = microbatch % num_components, microbatch // num_components
        row = rank * num_components + component
        for i in range(memory.first_row[row], memory.first_row[row + 1]):
            other = memory.rows[i]
            if started[other] <= k:
                is_oldest = False
                if level + max(held_bytes[other], 0) + peak_bytes[other] > limit:
                    is_safe = False
                    break
                level += held_bytes[other]
        if not is_safe:
            break
        if is_oldest:
            oldest[rank] = microbatch + 1
    started[task] -= 1
    return is_safe
