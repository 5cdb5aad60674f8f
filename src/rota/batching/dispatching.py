"""List scheduling of micro-batches that differ: one sequence for all tasks, and levels of bytes that shape the orders.

Every task does the micro-batches in one given sequence, so a rank only chooses between its tasks. A free rank prefers
what other stages' backwards wait for (B, I), then forwards, then what nothing reads (W). While a rank holds less than
its *forward level*, forwards come first: that shapes fill and steady state, as 1F1B's warm-up counts do. While more
waits for weight gradients than its *weight level*, these come before forwards. A rank with *patience* waits for a
preferred op that is due soon, as in Giffler and Thompson, "Algorithms for Solving Production-Scheduling Problems",
1960.

An op that takes memory starts only if the oldest micro-batch that the rank has not finished still fits after it, as by
Dijkstra's banker. All ranks have the same sequence, so the oldest of the step can always go on: nothing gets stuck.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rota.batching.problem import BatchProblem, Integers

NEVER = 1 << 61  #: the time of what never happens


class Policy(NamedTuple):
    """What shapes the orders of a sequence.

    Attributes:
        forward_levels: int64[num_ranks]: below so many held bytes, forwards come first.
        weight_levels: int64[num_ranks]: above so many bytes that wait for W, a W comes before forwards.
        patience: A rank idles for a preferred op if that takes less than `patience` times the delay it avoids.
    """

    forward_levels: Integers
    weight_levels: Integers
    patience: float


class Dispatch(NamedTuple):
    """A step's times.

    Attributes:
        makespan_us: When the last step end is over; a huge number if memory let nothing more start.
        starts_us: int64[num_microbatches, num_tasks].
        orders: int32[num_ranks, most ops of a rank]: task numbers in order of execution; a task's k-th appearance is
            the k-th micro-batch of the sequence. -1 after the last one.
    """

    makespan_us: int
    starts_us: Integers
    orders: NDArray[np.int32]

    @property
    def is_complete(self) -> bool:
        """Whether all ops were started."""
        return self.makespan_us < NEVER


def dispatch(problem: BatchProblem, sequence: Integers, policy: Policy) -> Dispatch:
    """The orders of one sequence and policy; `sequence`: int64[num_microbatches]."""
    starts_us = np.zeros((problem.num_microbatches, problem.num_tasks), np.int64)
    orders = np.full((problem.num_ranks, problem.most_ops), -1, np.int32)
    makespan_us = run(problem.tables, sequence, *policy, problem.limits_bytes, starts_us, orders)
    return Dispatch(makespan_us, starts_us, orders)


@njit(cache=True, nogil=True)
def run(tables, sequence, levels, weight_levels, patience, limits, starts, orders):  # type: ignore[no-untyped-def]
    """The makespan of a dispatch, or `NEVER`; fills `starts`, and `orders` unless it has no columns."""
    durations, held, peaks, lags = tables.durations_us, tables.held_bytes, tables.peak_bytes, tables.lags_us
    rank_of, choice_of, tails = tables.rank_of, tables.choice_of, tables.tails_us
    first_in, in_edge, in_task = tables.first_in, tables.in_edge, tables.in_task
    first_out, outs, first_on, on = tables.first_out, tables.out_task, tables.first_on, tables.on
    num_microbatches, num_tasks = durations.shape
    num_ranks, keeps_orders = len(first_on) - 1, orders.shape[1] > 0
    done = np.zeros(num_tasks, np.int64)  # ops of the task that have started
    ready = np.full(num_tasks, NEVER)
    free, wake = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    level, placed = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    waiting = np.zeros(num_ranks, np.int64)  # bytes that weight gradients will free
    for t in range(num_tasks):
        if first_in[t] == first_in[t + 1]:
            ready[t] = 0
    left = num_microbatches * num_tasks
    while left > 0:
        rank = 0
        for q in range(1, num_ranks):
            if wake[q] < wake[rank]:
                rank = q
        now = wake[rank]
        if now == NEVER:
            return NEVER
        if free[rank] > now:
            wake[rank] = free[rank]
            continue
        begin, end = first_on[rank], first_on[rank + 1]
        oldest = num_microbatches
        for i in range(begin, end):
            oldest = min(oldest, done[on[i]])
        reserve = -1  # what the oldest micro-batch needs to be finished, computed when it is first asked for
        chosen, best, wake_at = -1, 1 << 20, NEVER
        due, due_choice = NEVER, 1 << 20
        forward_first = level[rank] < levels[rank]
        for i in range(begin, end):
            t = on[i]
            if ready[t] == NEVER:
                continue
            k = done[t]
            m = sequence[k]
            takes = max(held[m, t], 0)
            if level[rank] + takes + peaks[m, t] > limits[rank]:
                continue
            if k != oldest and held[m, t] > 0:
                if reserve < 0:
                    reserve = _to_finish(held, peaks, done, on, begin, end, oldest, sequence[oldest])
                if level[rank] + takes + reserve > limits[rank]:
                    continue
            choice = 2 * choice_of[t]
            if forward_first and choice == 2:
                choice = -1
            elif choice == 4 and waiting[rank] > weight_levels[rank]:
                choice = 1
            choice = choice * 256 + i - begin
            if ready[t] <= now:
                if choice < best:
                    chosen, best = t, choice
            else:
                wake_at = min(wake_at, ready[t])
                if choice_of[t] == 0 and ready[t] < due:
                    due, due_choice = ready[t], choice
        if chosen >= 0 and due_choice < best and patience > 0:
            over = now + durations[sequence[done[chosen]], chosen]
            if over > due and due - now < patience * (over - due):
                chosen = -1
        if chosen < 0:
            wake[rank] = wake_at
            continue
        k = done[chosen]
        m = sequence[k]
        over = now + durations[m, chosen]
        starts[m, chosen] = now
        if keeps_orders:
            orders[rank, placed[rank]] = chosen
            placed[rank] += 1
        level[rank] += held[m, chosen]
        if choice_of[chosen] == 2:
            waiting[rank] += held[m, chosen]
        free[rank] = wake[rank] = over
        done[chosen] = k + 1
        left -= 1
        ready[chosen] = NEVER
        if k + 1 < num_microbatches:
            ready[chosen] = _ready(chosen, k + 1, sequence, done, durations, lags, first_in, in_edge, in_task, starts)
        for i in range(first_out[chosen], first_out[chosen + 1]):
            u = outs[i]
            if choice_of[u] == 2:
                waiting[rank_of[u]] -= held[m, u]
            if done[u] == k and ready[u] == NEVER:
                ready[u] = _ready(u, k, sequence, done, durations, lags, first_in, in_edge, in_task, starts)
                if ready[u] < NEVER:
                    wake[rank_of[u]] = min(wake[rank_of[u]], max(ready[u], free[rank_of[u]]))
    makespan = 0
    for rank in range(num_ranks):
        makespan = max(makespan, free[rank] + tails[rank])
    return makespan


@njit(cache=True, nogil=True)
def _ready(t, k, sequence, done, durations, lags, first_in, in_edge, in_task, starts):  # type: ignore[no-untyped-def]
    """When the inputs of a task's k-th op are there; `NEVER` if one of them has not started."""
    m, at = sequence[k], 0
    for i in range(first_in[t], first_in[t + 1]):
        u = in_task[i]
        if done[u] <= k:
            return NEVER
        at = max(at, starts[m, u] + durations[m, u] + lags[m, in_edge[i]])
    return at


@njit(cache=True, nogil=True)
def _to_finish(held, peaks, done, on, begin, end, oldest, m):  # type: ignore[no-untyped-def]
    """Bytes that a rank needs on top of its level to finish its oldest micro-batch."""
    level, need = 0, 0
    for i in range(begin, end):
        t = on[end - 1 - (i - begin)]
        if done[t] == oldest:
            need = max(need, level + max(held[m, t], 0) + peaks[m, t])
            level += held[m, t]
    return need
