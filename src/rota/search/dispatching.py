"""List scheduling: a free rank starts, of the ops whose inputs are there and that fit, the one of best priority.

Graham, "Bounds on Multiprocessing Timing Anomalies", 1969. A rank may also wait for a better op that is due soon, as in
Giffler and Thompson, "Algorithms for Solving Production-Scheduling Problems", 1960: that keeps all good orders within
reach. A cap on a forward keeps the micro-batches between it and its backward few, however much memory there is: that
shapes fill and steady state, as the warm-up counts of 1F1B do.

Memory is granted as by Dijkstra's banker ("Cooperating Sequential Processes", 1965): an op that takes memory starts
only if after it each rank can still finish its micro-batches one by one, oldest first. Then nothing gets stuck, unless
what micro-batches leave behind for good fills the memory in an unlucky order.

Good priorities are the times at which ops would start in an ideal steady state: `guesses`.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rota.compiled import inner, int64, quick
from rota.core.stopping import look
from rota.core.tasks import Kind
from rota.search.problem import NO_LIMIT, Floats, Integers, Orders, Problem, Rows
from rota.search.timing import Tables

Priorities = Floats  #: float64[num_ops]: per node, the lowest goes first

NO_CAP = 1 << 60  #: stands for "any number in flight" in arrays of caps

OPS_PER_DISPATCH = 6  #: list scheduling costs as much per op as a replay costs for this many

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
    safe_bytes: Integers  #: int64[num_ranks]: with no more than this held, a rank can finish what it has begun
    caps: Integers  #: int64[num_tasks]: most micro-batches between a forward and its backward, or NO_CAP
    backward_of: Integers  #: int64[num_tasks]: the task that ends what the cap counts; -1: the task has no cap

    @classmethod
    def of(cls, problem: Problem) -> Memory:
        """The tables of a problem, without caps."""
        placement, order = problem.placement, one_at_a_time(problem)
        tasks, component_of = placement.tasks, placement.component_of
        pairs = ((rank, c) for rank in range(placement.num_ranks) for c in range(placement.num_components))
        rows = Rows.of([[t for t in order if r in tasks[t].ranks and component_of[t] == c] for r, c in pairs])
        components = np.array(component_of, np.int64)
        held, peak, backward_of = problem.held_bytes, problem.peak_bytes, backwards(problem)
        caps = np.full(len(tasks), NO_CAP)
        safe = problem.limits_bytes - np.array([_most_to_finish(problem, rank) for rank in range(placement.num_ranks)])
        return cls(problem.limits_bytes, held, peak, rows.first, rows.values, components, safe, caps, backward_of)


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
    ready_us: Integers  #: int64[num_tasks]: when the inputs of the task's next op are there, _NEVER if not known yet
    due_us: Integers  #: int64[num_tasks]: when the task's next op could start, as far as its rank has looked

    @classmethod
    def of(cls, tables: Tables) -> DispatchState:
        """The state before the first op."""
        num_ranks, num_tasks = len(tables.first_op) - 1, len(tables.durations_us)
        is_ready = (tables.first_input[1:] == tables.first_input[:-1]) & (np.diff(tables.first_node) > 0)
        return cls(
            np.zeros(tables.first_op[-1], np.int32),
            tables.first_op[:-1].copy(),
            np.zeros(num_ranks, np.int64),
            np.zeros(num_ranks, np.int64),
            np.zeros(num_tasks, np.int64),
            np.zeros(tables.first_node[-1], np.int64),
            np.zeros(num_ranks, np.int64),
            np.zeros(num_ranks, np.int64),
            np.full(num_ranks, -1),
            np.where(is_ready, 0, _NEVER),
            np.zeros(num_tasks, np.int64),
        )


class Dispatcher:
    """Makes orders of a problem from priorities, many times."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tables = Tables.of(problem)
        self.memory = Memory.of(problem)
        self.num_started = 0  #: ops that the last call has started, an op on several ranks once on each
        work_us, tails_us = problem.counts * problem.durations_us, problem.tails_us
        rows = [tasks[problem.counts[tasks] > 0] for tasks in problem.tasks_on]
        #: int64[num_ranks]: work of the rank and what follows it at least
        self._least_us = np.array([work_us[row].sum() + tails_us[row].min() if len(row) else 0 for row in rows])

    def __call__(
        self,
        priorities: Priorities,
        patience: float | Floats = 0.0,
        limits_bytes: Integers | None = None,
        caps: Integers | None = None,
        most_us: int = _NEVER,
    ) -> Orders | None:
        """The orders, or None where memory lets nothing more start, or some rank is too late to end by `most_us`.

        Args:
            priorities: float64[num_ops], per node; the lowest goes first.
            patience: A rank waits for a better op rather than start a worse one that would delay it, if it idles less
                than `patience` times that delay; one for all ranks, or float64[num_ranks].
            limits_bytes: int64[num_ranks], lower than the problem's limits to keep fewer micro-batches in flight.
            caps: int64[num_tasks]: most micro-batches between each forward and its backward, 1 or more.
            most_us: How long the step may last. An order that lasts longer may be returned all the same.
        """
        memory = self.memory
        if limits_bytes is not None:
            lower = memory.limits_bytes - limits_bytes
            memory = memory._replace(limits_bytes=limits_bytes, safe_bytes=memory.safe_bytes - lower)
        memory = memory if caps is None else memory._replace(caps=caps)
        state, num_ranks = DispatchState.of(self.tables), len(self.tables.first_op) - 1
        patiences = np.full(num_ranks, patience, np.float64)
        latest_us = most_us - self._least_us  # when each rank's next op must start if those after it are to end in time
        while run(self.tables, memory, priorities, patiences, latest_us, state, _OPS_PER_CALL):
            look()
        self.num_started = int((state.next_op - self.tables.first_op[:-1]).sum())
        return state.orders if self.num_started == self.tables.first_op[-1] else None

    @property
    def ops_of_last_call(self) -> int:
        """What the last call cost, and timing what it found, as the number of ops that could be timed instead."""
        return OPS_PER_DISPATCH * self.num_started + int(self.tables.first_op[-1])


def serial(problem: Problem) -> Orders:
    """One micro-batch at a time, or one sample whose chunks are; in the order that exceeds the limits least."""
    order, placement, joined = one_at_a_time(problem), problem.placement, _joined_streams(problem)
    num_rounds, num_last = divmod(problem.num_microbatches, placement.num_components)
    rows: list[NDArray[np.int32]] = []
    for rank in range(placement.num_ranks):
        tasks = [task for task in order if rank in placement.tasks[task].ranks]
        tasks.sort(key=lambda task: joined[placement.component_of[task]])
        last = [task for task in tasks if joined[placement.component_of[task]] < num_last]
        rows += [np.tile(np.array(tasks, np.int32), num_rounds), np.array(last, np.int32)]
    return np.concatenate(rows)


def _joined_streams(problem: Problem) -> list[int]:
    """For each data stream the first of those that run together, as an op of a later one precedes one of an earlier."""
    component_of = problem.placement.component_of
    until = [*range(problem.placement.num_components)]
    for before, task in problem.precedences:
        first = component_of[task]
        until[first] = max(until[first], component_of[before])
    joined: list[int] = []
    start = end = 0
    for component, last in enumerate(until):
        start = component if component > end else start
        end = max(end, last)
        joined.append(start)
    return joined


def one_at_a_time(problem: Problem) -> tuple[int, ...]:
    """The tasks of one micro-batch in the order that minimizes the most that any rank holds over its limit.

    Dijkstra's algorithm over the sets of tasks done, where the largest step counts, not the sum. After `_MOST_STATES`
    sets, only the best one is followed.
    """
    tasks, limits = problem.placement.tasks, problem.limits_bytes.tolist()
    held, peak = problem.held_bytes.tolist(), problem.peak_bytes.tolist()
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
            need = max(held[t], 0) + peak[t]
            overs[t] = max(over, *(levels[rank] + need - limits[rank] for rank in tasks[t].ranks))
        harmless = [t for t in ready if held[t] <= 0 and overs[t] <= over]  # doing it later is no better
        for t in harmless[:1] or ready:
            now_done = done | 1 << t
            after = list(levels)
            for rank in tasks[t].ranks:
                after[rank] += held[t]
            now_ready = [o for o in outputs[t] if not needs[o] & ~now_done] + [other for other in ready if other != t]
            state = now_done, tuple(after), tuple(now_ready), (*order, t)
            heappush(heap, (overs[t], -len(state[-1]), next(tie_breaker), *state))


def from_starts(problem: Problem, starts_us: Floats, period_us: float) -> Priorities:
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


def backwards(problem: Problem) -> Integers:
    """int64[num_tasks]: per forward the backward of its stage that other stages wait for; -1 for all other tasks."""
    index, tasks = problem.placement.index, problem.placement.tasks
    result = np.full(len(tasks), -1)
    for i, task in enumerate(tasks):
        if task.kind is Kind.F:
            result[i] = index.get((task.stage, Kind.I), index.get((task.stage, Kind.B), -1))
    return result


def _most_to_finish(problem: Problem, rank: int) -> int:
    """The most bytes that a rank needs on top to finish, oldest first, the micro-batches that it has begun.

    That is easy to say where whatever a micro-batch holds is taken before anything of it is freed, and freed in the
    end: finishing one then leaves no less room for the next. Elsewhere it is NO_LIMIT: nobody knows.
    """
    tasks, component_of = problem.placement.tasks, np.array(problem.placement.component_of)
    most, on = 0, problem.tasks_on[rank]
    for component in range(problem.placement.num_components):
        own = on[component_of[on] == component]
        taking, freeing = own[problem.held_bytes[own] > 0], own[problem.held_bytes[own] < 0]
        if not problem.after[np.ix_(taking, freeing)].all() or problem.held_bytes[own].sum() > 0:
            return NO_LIMIT
        need = int(problem.held_bytes[taking].sum())
        is_first = [problem.after[t, own[own != t]].all() for t in taking]
        if problem.placement.num_components == 1 and any(is_first):  # every micro-batch that was begun has this one
            need -= int(problem.held_bytes[taking[is_first.index(True)]])
        most = max(most, need + max((tasks[t].peak_bytes for t in own), default=0))
    return most


# Passing a tuple of arrays to a compiled function counts references to each, which costs as much as a short loop. So
# `run` calls `admits` only where it must.
@quick
def run(
    tables: Tables,
    memory: Memory,
    priorities: Priorities,
    patiences: Floats,
    latest_us: Integers,
    state: DispatchState,
    most_ops: int,
) -> bool:
    """Starts `most_ops` ops; False when none is left, memory and caps let none start, or a rank is late."""
    _, first_node, durations, first_rank, ranks, first_input, inputs, first_output, outputs, first_on, on, _ = tables
    orders, next_op, free_us, wake_us, started, ends_us, levels, _, newest, ready_us, due_us = state
    limits, held_bytes, peak_bytes, first_row, _, component_of, safe_bytes, caps, backward_of = memory
    num_ranks = len(free_us)
    num_components = (len(first_row) - 1) // num_ranks
    work_together = len(ranks) > len(durations)
    num_ops = 0
    while True:
        rank = 0
        for q in range(1, num_ranks):
            if wake_us[q] < wake_us[rank]:
                rank = q
        now = wake_us[rank]
        if now == _NEVER:
            return False
        if num_ops == most_ops:
            return True
        if free_us[rank] > now:
            wake_us[rank] = free_us[rank]
            continue
        chosen, wake = -1, _NEVER
        for i in range(first_on[rank], first_on[rank + 1]):
            task = on[i]
            at, held, backward = ready_us[task], held_bytes[task], backward_of[task]
            if at < _NEVER and backward >= 0 and started[task] - started[backward] >= caps[task]:
                at = _NEVER
            if at < _NEVER:
                for j in range(first_rank[task], first_rank[task + 1]):
                    q = ranks[j]
                    at = max(at, free_us[q])
                    if limits[q] < NO_LIMIT:
                        level = levels[q] + max(held, 0)
                        if level + peak_bytes[task] > limits[q] or (
                            held > 0 and level > safe_bytes[q] and not admits(memory, state, q, task, num_components)
                        ):
                            at = _NEVER
                            break
            due_us[task] = at
            if at > now:
                wake = min(wake, at)
        for i in range(first_on[rank], first_on[rank + 1]):
            task = on[i]
            if due_us[task] > now:
                continue
            priority = priorities[first_node[task] + started[task]]
            if chosen >= 0 and priority >= priorities[first_node[chosen] + started[chosen]]:
                continue
            end = now + durations[task]
            is_better_to_wait = False
            if wake < end:
                for j in range(first_on[rank], first_on[rank + 1]):
                    other = on[j]
                    if now < due_us[other] < end and priorities[first_node[other] + started[other]] < priority:
                        is_better_to_wait |= due_us[other] - now < patiences[rank] * (end - due_us[other])
            if not is_better_to_wait:
                chosen = task
        wake_us[rank] = wake
        if chosen < 0:
            continue
        if now > latest_us[rank]:
            return False
        num_ops += 1
        k, end = started[chosen], now + durations[chosen]
        ends_us[first_node[chosen] + k] = end
        started[chosen] += 1
        for j in range(first_rank[chosen], first_rank[chosen + 1]):
            q = ranks[j]
            orders[next_op[q]] = chosen
            next_op[q] += 1
            free_us[q] = wake_us[q] = end
            latest_us[q] += durations[chosen]
            levels[q] += held_bytes[chosen]
            newest[q] = max(newest[q], k * num_components + component_of[chosen])
        for o in range(first_output[chosen] - 2, first_output[chosen + 1], 2):  # itself first, then what it feeds
            task = chosen if o < first_output[chosen] else outputs[o]
            if task != chosen and started[task] != k:
                continue
            n = started[task]
            at = int64(0) if n < first_node[task + 1] - first_node[task] else _NEVER
            for i in range(first_input[task], first_input[task + 1], 2):
                if at == _NEVER or started[inputs[i]] <= n:
                    at = _NEVER
                    break
                at = max(at, ends_us[first_node[inputs[i]] + n] + inputs[i + 1])
            ready_us[task] = at
            for j in range(first_rank[task], first_rank[task + 1]):
                q = ranks[j]
                wake_us[q] = min(wake_us[q], max(at, free_us[q]))
        if work_together:  # another rank may have waited for this one, or for its memory
            for q in range(num_ranks):
                wake_us[q] = min(wake_us[q], max(end, free_us[q]))


@inner
def admits(memory: Memory, state: DispatchState, rank: int, task: int, num_components: int) -> bool:
    """Whether the task's next op fits on the rank, and after it the rest of the rank's micro-batches one by one."""
    started, levels, oldest, newest = state.started, state.levels, state.oldest, state.newest
    limit, held_bytes, peak_bytes = memory.limits_bytes[rank], memory.held_bytes, memory.peak_bytes
    held = held_bytes[task]
    if levels[rank] + max(held, 0) + peak_bytes[task] > limit:
        return False
    if held <= 0 or limit == NO_LIMIT or levels[rank] + held <= memory.safe_bytes[rank]:
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
        if level <= memory.safe_bytes[rank]:
            break
    started[task] -= 1
    return is_safe
