"""When each op starts in given orders, and how much memory the orders need: the simulator's answer, compiled.

Each rank runs as far as it can; then the ranks that it sent data to do. This is linear in ops and edges. An op on
several ranks starts when it is next on all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rota.compiled import inner, int64, is_on_disk, quick
from rota.search.problem import Integers, Orders, Problem, StepEnds

_NEVER = 1 << 61


class Tables(NamedTuple):
    """A problem for compiled loops. `first_x` and the field after it are the `first` and `values` of `Rows`."""

    first_op: Integers  #: int64[num_ranks + 1], as `Problem.first_op`
    first_node: Integers  #: int64[num_tasks + 1], as `Problem.first_node`
    durations_us: Integers  #: int64[num_tasks]
    first_rank: Integers  #: int64[num_tasks + 1]
    ranks: Integers  #: int64[...]: each task's ranks
    first_input: Integers  #: int64[num_tasks + 1]
    inputs: Integers  #: int64[2 * num_edges]: source, lag in µs, source, lag … per task
    first_output: Integers  #: int64[num_tasks + 1]
    outputs: Integers  #: int64[2 * num_edges]: target, lag in µs, target, lag … per task
    first_on: Integers  #: int64[num_ranks + 1]
    on: Integers  #: int64[...]: each rank's tasks
    num_ranks: int  #: further ranks are shared links: see `Problem.num_ranks`

    @classmethod
    def of(cls, problem: Problem) -> Tables:
        """The tables of a problem."""
        ranks, inputs, outputs, on = problem.ranks, problem.inputs, problem.outputs, problem.tasks_on
        return cls(
            problem.first_op,
            problem.first_node,
            problem.durations_us,
            *(ranks.first, ranks.values, inputs.first, inputs.values),
            *(outputs.first, outputs.values, on.first, on.values),
            problem.num_ranks,
        )


class Score(NamedTuple):
    """As `Timeline` has them: step ends count for the makespan, not for the span."""

    makespan_us: int
    span_us: int


def score(problem: Problem, orders: Orders) -> Score | None:
    """Makespan and span of the orders; None where they wait in a cycle."""
    tables = Tables.of(problem)
    starts_us = start_times(tables, orders)
    if starts_us is None:
        return None
    return Score(*measure(tables, problem.step_ends, orders, starts_us))


def start_times(tables: Tables, orders: Orders) -> Integers | None:
    """int64[num_ops]: the earliest start of each node in µs; None where the orders wait in a cycle."""
    num_ranks = len(tables.first_op) - 1
    next_op, free_us = tables.first_op[:-1].copy(), np.zeros(num_ranks, np.int64)
    started = np.zeros(len(tables.durations_us), np.int64)
    starts_us = np.zeros(tables.first_node[-1], np.int64)
    latest_us = np.full(num_ranks, _NEVER)
    return starts_us if replay(tables, orders, next_op, free_us, latest_us, started, starts_us) else None


def peaks(problem: Problem, orders: Orders) -> Integers:
    """int64[num_ranks]: the most that each rank's ops hold, without static bytes and transfers."""
    return walk_memory(orders, problem.first_op, problem.held_bytes, problem.peak_bytes)


def fits(problem: Problem, orders: Orders) -> bool:
    """Whether no rank holds more than it may."""
    return bool((peaks(problem, orders) <= problem.limits_bytes).all())


def is_compiled() -> bool:
    """Whether an earlier process on this machine has compiled loops of the search."""
    return is_on_disk(replay)


@quick
def replay(
    tables: Tables,
    orders: Orders,
    next_op: Integers,
    free_us: Integers,
    latest_us: Integers,
    started: Integers,
    starts_us: Integers,
) -> bool:
    """Times the ops from `next_op` on, and returns whether it reached the end.

    It stops in a cycle, and when a rank is late: the rank's next op must start by `latest_us`.

    Args:
        tables: The problem, as `Tables`.
        orders: int32[num_ops].
        next_op: int64[num_ranks]: where in `orders` each rank goes on; updated.
        free_us: int64[num_ranks]: when each rank is free; updated.
        latest_us: int64[num_ranks]: when the next op must start if the ops after it are to end in time; updated.
        started: int64[num_tasks]: how many ops of each task have a start; updated.
        starts_us: int64[num_ops], per node; filled.
    """
    first_op, first_node, durations, first_rank, ranks, first_input, inputs, first_output, outputs, _, _, _ = tables
    num_ranks = len(first_op) - 1
    pending, is_pending = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.bool_)
    for r in range(num_ranks):
        pending[r], is_pending[r] = r, True
    num_pending = num_ranks
    while num_pending:
        num_pending -= 1
        r = pending[num_pending]
        is_pending[r] = False
        while next_op[r] < first_op[r + 1]:
            task = orders[next_op[r]]
            k = started[task]
            start = free_us[r]
            ready = True
            for i in range(first_input[task], first_input[task + 1], 2):
                source = inputs[i]
                if started[source] <= k:
                    ready = False
                    break
                start = max(start, starts_us[first_node[source] + k] + durations[source] + inputs[i + 1])
            if ready and first_rank[task + 1] - first_rank[task] > 1:
                for i in range(first_rank[task], first_rank[task + 1]):
                    q = ranks[i]
                    if next_op[q] == first_op[q + 1] or orders[next_op[q]] != task:
                        ready = False
                        break
                    start = max(start, free_us[q])
            if not ready:
                break
            if start > latest_us[r]:
                return False
            starts_us[first_node[task] + k] = start
            started[task] += 1
            for i in range(first_rank[task], first_rank[task + 1]):
                q = ranks[i]
                next_op[q] += 1
                free_us[q] = start + durations[task]
                latest_us[q] += durations[task]
                if q != r and not is_pending[q]:
                    is_pending[q] = True
                    pending[num_pending] = q
                    num_pending += 1
            for i in range(first_output[task], first_output[task + 1], 2):
                fed = outputs[i]
                for j in range(first_rank[fed], first_rank[fed + 1]):
                    q = ranks[j]
                    if q != r and not is_pending[q]:
                        is_pending[q] = True
                        pending[num_pending] = q
                        num_pending += 1
    num_late = 0
    for r in range(num_ranks):
        num_late += next_op[r] < first_op[r + 1]
    return num_late == 0


@quick
def measure(tables: Tables, step_ends: StepEnds, orders: Orders, starts_us: Integers) -> tuple[int, int]:
    """(makespan, span) in µs of `orders` (int32[num_ops]) whose nodes start at `starts_us` (int64[num_ops])."""
    first_op, first_node, durations = tables.first_op, tables.first_node, tables.durations_us
    makespan = span = int64(0)
    for r in range(tables.num_ranks):  # what a shared link serves is read later
        free = int64(0)
        if first_op[r] < first_op[r + 1]:
            first, last = orders[first_op[r]], orders[first_op[r + 1] - 1]
            free = starts_us[first_node[last + 1] - 1] + durations[last]
            span = max(span, free - starts_us[first_node[first]])
        if step_ends.first[r] < step_ends.first[r + 1]:
            free = end_step(tables, step_ends, orders, starts_us, r, free)
        makespan = max(makespan, free)
    return makespan, span


@inner
def end_step(tables: Tables, step_ends: StepEnds, orders: Orders, starts_us: Integers, rank: int, free: int) -> int:
    """When a rank, whose ops end at `free`, has also finished its step ends, in µs.

    Reductions run in the order of their last gradients; all optimizer steps run after them.
    """
    first, after = step_ends.first[rank], step_ends.first[rank + 1]
    last_at = np.zeros(len(tables.durations_us), np.int64)  # 1 more than the place in `orders`; 0: nowhere
    for i in range(tables.first_op[rank], tables.first_op[rank + 1]):
        last_at[orders[i]] = i + 1
    complete_at, in_order = np.zeros(after - first, np.int64), np.empty(after - first, np.int64)
    for e in range(after - first):
        for i in range(step_ends.first_gradient[first + e], step_ends.first_gradient[first + e + 1]):
            complete_at[e] = max(complete_at[e], last_at[step_ends.gradients[i]])
        i = e  # sorted by insertion: a rank has few step ends
        while i > 0 and complete_at[in_order[i - 1]] > complete_at[e]:
            in_order[i] = in_order[i - 1]
            i -= 1
        in_order[i] = e
    reduced = optimizers = int64(0)
    for i in range(after - first):
        e = in_order[i]
        if complete_at[e] > 0:
            task = orders[complete_at[e] - 1]
            reduced = max(reduced, starts_us[tables.first_node[task + 1] - 1] + tables.durations_us[task])
        reduced += step_ends.reduce_us[first + e]
        optimizers += step_ends.optimizer_us[first + e]
    return max(free, reduced) + optimizers


@quick
def walk_memory(orders: Orders, first_op: Integers, held_bytes: Integers, peak_bytes: Integers) -> Integers:
    """int64[num_ranks]: the most bytes that each rank's ops hold at once; this depends on their order alone."""
    num_ranks = len(first_op) - 1
    peaks = np.zeros(num_ranks, np.int64)
    for r in range(num_ranks):
        level = int64(0)
        for i in range(first_op[r], first_op[r + 1]):
            held = held_bytes[orders[i]]
            peaks[r] = max(peaks[r], level + max(held, 0) + peak_bytes[orders[i]])
            level += held
    return peaks
