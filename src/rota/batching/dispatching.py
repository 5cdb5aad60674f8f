"""List scheduling of micro-batches that differ: one sequence for all tasks, and levels of bytes that shape the orders.

Every task does the micro-batches in one given sequence, so a rank only chooses between its tasks. A free rank prefers
what other stages' backwards wait for (B, I), then forwards, then what nothing reads (W). While a rank holds less than
its *forward level*, forwards come first: that shapes fill and steady state, as 1F1B's warm-up counts do. While more
waits for weight gradients than its *weight level*, these come before forwards. A rank with *patience* waits for a
preferred op that is due soon, as in Giffler and Thompson, "Algorithms for Solving Production-Scheduling Problems",
1960.

An op that takes memory starts only if the oldest micro-batch that the rank has not finished still fits after it, as by
Dijkstra's banker. All ranks have the same sequence, so the oldest of the step can always go on: nothing gets stuck.

A *valley* sequence has small micro-batches at both ends, so that the pipeline fills and drains fast, and large ones in
the middle, where neighbours of similar size keep each other's ranks busy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rota.batching.problem import BatchProblem, Integers, Orders, Tables
from rota.compiled import inner, loop

NEVER = 1 << 61  #: the time of what never happens

_SCALES = (1.0, 0.3, 0.7, 0.85, 1.15, 1.5)  # of the forward levels of 1F1B
#: Micro-batches that wait for their weight gradients: on every rank, and more for each rank of depth, as in ZB-H1.
_WEIGHT_SCALES = (
    *((1.0, 0.0), (0.0, 0.0), (2.0, 0.0), (4.0, 0.0), (1e4, 0.0)),
    *((0.0, 1.0), (0.0, 2.0), (0.0, 0.5), (1.0, 1.0)),
)
_PATIENCES = (0.5, 0.0, 1.0, 2.0)


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
    orders: Orders


def dispatch(problem: BatchProblem, sequence: Integers, policy: Policy) -> Dispatch:
    """The orders of one sequence and policy; `sequence`: int64[num_microbatches]."""
    starts_us = np.zeros((problem.num_microbatches, problem.num_tasks), np.int64)
    orders = np.full((problem.num_ranks, problem.most_ops), -1, np.int32)
    makespan_us = run(problem.tables, problem.limits_bytes, sequence, policy, starts_us, orders)
    return Dispatch(makespan_us, starts_us, orders)


def valley(problem: BatchProblem) -> Integers:
    """int64[num_microbatches]: from both ends towards the middle, ever larger ones."""
    order = np.argsort(problem.durations_us.sum(axis=1), kind="stable")
    return np.concatenate([order[::2], order[1::2][::-1]])


def falling(problem: BatchProblem) -> Integers:
    """int64[num_microbatches]: the largest first."""
    return np.argsort(-problem.durations_us.sum(axis=1), kind="stable")


def by_policy(problem: BatchProblem, sequence: Integers) -> Dispatch | None:
    """The best orders of some policies, by one parameter after the other; None if memory never lets some op start."""
    weight_scales = _WEIGHT_SCALES if problem.has_weights else _WEIGHT_SCALES[:1]
    choices: list[tuple[Any, ...]] = [_SCALES, weight_scales, _PATIENCES]
    num_ranks, depth = problem.num_ranks, np.arange(problem.num_ranks)
    room = np.minimum(problem.limits_bytes, 2 * problem.mean_held_bytes * num_ranks)
    levels = room * (num_ranks - depth) / num_ranks  # they fall from the first rank to the last as in 1F1B
    waiting = -problem.held_bytes[:, problem.choice_of == 2].mean() if problem.has_weights else 0.0  # for a typical W
    tried: dict[tuple[int, ...], Dispatch] = {}

    def value(key: tuple[int, ...]) -> int:
        if key not in tried:
            scale, (flat, slope), patience = (choices[i][k] for i, k in enumerate(key))
            weight_levels = (waiting * (flat + slope * depth)).astype(np.int64)
            policy = Policy((levels * scale).astype(np.int64), weight_levels, patience)
            tried[key] = dispatch(problem, sequence, policy)
        return tried[key].makespan_us

    chosen = [0, 0, 0]
    for _ in range(2):
        for i, options in enumerate(choices):
            keys = [(*chosen[:i], k, *chosen[i + 1 :]) for k in range(len(options))]
            chosen = [*min(keys, key=value)]
    best = tried[tuple(chosen)]
    return best if best.makespan_us < NEVER else None


@loop
def run(tables: Tables, limits: Integers, sequence: Integers, policy: Policy, starts: Integers, orders: Orders) -> int:
    """The makespan of a dispatch, or `NEVER`; fills `starts` and `orders`."""
    levels, weight_levels, patience = policy
    durations, held, peaks = tables.durations_us, tables.held_bytes, tables.peak_bytes
    rank_of, choice_of, tails = tables.rank_of, tables.choice_of, tables.tails_us
    first_in = tables.first_in
    first_out, outs, first_on, on = tables.first_out, tables.out_task, tables.first_on, tables.on
    num_microbatches, num_tasks = durations.shape
    num_ranks = len(first_on) - 1
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
                    reserve = _to_finish(tables, rank, sequence, done, oldest)
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
            ready[chosen] = _ready(tables, chosen, k + 1, sequence, done, starts)
        for i in range(first_out[chosen], first_out[chosen + 1]):
            u = outs[i]
            if choice_of[u] == 2:
                waiting[rank_of[u]] -= held[m, u]
            if done[u] == k and ready[u] == NEVER:
                ready[u] = _ready(tables, u, k, sequence, done, starts)
                if ready[u] < NEVER:
                    wake[rank_of[u]] = min(wake[rank_of[u]], max(ready[u], free[rank_of[u]]))
    makespan = 0
    for rank in range(num_ranks):
        makespan = max(makespan, free[rank] + tails[rank])
    return makespan


@inner
def _ready(tables: Tables, t: int, k: int, sequence: Integers, done: Integers, starts: Integers) -> int:
    """When the inputs of a task's k-th op are there; `NEVER` if one of them has not started."""
    m, at = sequence[k], 0
    for i in range(tables.first_in[t], tables.first_in[t + 1]):
        u = tables.in_task[i]
        if done[u] <= k:
            return NEVER
        at = max(at, starts[m, u] + tables.durations_us[m, u] + tables.lags_us[m, tables.in_edge[i]])
    return at


@inner
def _to_finish(tables: Tables, rank: int, sequence: Integers, done: Integers, oldest: int) -> int:
    """Bytes that a rank needs on top of its level to finish its oldest micro-batch."""
    m, level, need = sequence[oldest], 0, 0
    for i in range(tables.first_on[rank + 1] - 1, tables.first_on[rank] - 1, -1):
        t = tables.on[i]
        if done[t] == oldest:
            need = max(need, level + max(tables.held_bytes[m, t], 0) + tables.peak_bytes[m, t])
            level += tables.held_bytes[m, t]
    return need
