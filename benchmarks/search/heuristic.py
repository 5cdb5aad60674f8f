"""A simple heuristic for the search to beat: list scheduling with in-flight caps, and hill climbing over its policy.

python benchmarks/search/heuristic.py             every row of rows.py, a minute each
python benchmarks/search/heuristic.py wave16x64   some of them

A free rank starts, of the ops whose inputs are there, the one of the lowest priority; but a forward waits while as many
micro-batches of its stage are between forward and backward as the stage's cap says, or while memory is short. A rank
that is patient waits for a better op that comes before the worse one would end. Caps, priorities, patience: the climb
changes one of them at a time, and keeps what is no worse. Nothing here comes from `rota.search`.
"""

from __future__ import annotations

import sys
import time
from itertools import product
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray
from rows import rows

from rota import Kind, Op, Placement, Plan, simulate

LIMIT_S = 60.0
NEVER = 1 << 60

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


class Tables(NamedTuple):
    """A placement as arrays; task t's values are `values[first[t] : first[t + 1]]`."""

    count: int  #: micro-batches per task
    duration: Integers
    held: Integers
    limit: Integers  #: per rank
    backward: Integers  #: per forward, the stage's backward; -1 for other tasks
    first_rank: Integers
    ranks: Integers
    first_input: Integers
    inputs: Integers
    lags: Integers
    first_task: Integers  #: per rank
    tasks: Integers


class Policy(NamedTuple):
    """What the climb changes."""

    start: Floats  #: per task: its k-th op would like to start at start + k * period
    period: float
    cap: Integers  #: per forward: micro-batches between forward and backward
    patience: Floats  #: per rank: how long to wait for a better op, in parts of the delay of that op


def tables_of(placement: Placement, num_microbatches: int) -> Tables:
    tasks, index = placement.tasks, placement.index
    lags: dict[tuple[int, int], int] = {(edge.source, edge.target): 0 for edge in placement.edges}
    for route in placement.routes:
        pair = route.source, route.target
        lags[pair] = max(lags[pair], route.duration_us)
    backward = np.full(len(tasks), -1)
    for i, task in enumerate(tasks):
        if task.kind is Kind.F:
            kinds = (kind for kind in (Kind.I, Kind.B) if (task.stage, kind) in index)
            backward[i] = next((index[task.stage, kind] for kind in kinds), -1)
    into = [[(s, lag) for (s, t), lag in lags.items() if t == target] for target in range(len(tasks))]
    on = [[i for i, task in enumerate(tasks) if rank in task.ranks] for rank in range(placement.num_ranks)]
    limit = [NEVER if limit is None else limit for limit in placement.cluster.limit_bytes]
    return Tables(
        num_microbatches // placement.num_components,
        np.array([task.duration_us for task in tasks]),
        np.array([task.held_bytes for task in tasks]),
        np.array(limit) - np.array(placement.static_bytes),
        backward,
        *_rows([list(task.ranks) for task in tasks]),
        *_rows([[source for source, _ in row] for row in into]),
        np.array([lag for row in into for _, lag in row]),
        *_rows(on),
    )


def _rows(rows: list[list[int]]) -> tuple[Integers, Integers]:
    return np.cumsum([0, *map(len, rows)]), np.array([value for row in rows for value in row])


@njit(cache=True)
def dispatch(t, policy, start):  # type: ignore[no-untyped-def]
    """Fills start[task, k]; returns the makespan, or NEVER where memory or the caps let nothing more start."""
    count, duration, held, limit, backward, first_rank, ranks, first_input, inputs, lags, first_task, tasks = t
    wished, period, cap, patience = policy
    num_ranks, num_tasks = len(limit), len(duration)
    free, wake, level = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    done, due = np.zeros(num_tasks, np.int64), np.zeros(num_tasks, np.int64)
    makespan, left = np.int64(0), count * num_tasks
    while left:
        rank = np.argmin(wake)
        now = wake[rank]
        if now == NEVER:
            return NEVER
        if free[rank] > now:
            wake[rank] = free[rank]
            continue
        wake[rank] = NEVER
        for i in range(first_task[rank], first_task[rank + 1]):
            task = tasks[i]
            k, at = done[task], np.int64(0)
            if k == count or (backward[task] >= 0 and k - done[backward[task]] >= cap[task]):
                at = NEVER
            for j in range(first_rank[task], first_rank[task + 1]):
                at = max(at, free[ranks[j]])
                if level[ranks[j]] + held[task] > limit[ranks[j]]:
                    at = NEVER
            for j in range(first_input[task], first_input[task + 1]):
                if at < NEVER:
                    source = inputs[j]
                    at = max(at, start[source, k] + duration[source] + lags[j]) if done[source] > k else NEVER
            due[task] = at
            if at > now:
                wake[rank] = min(wake[rank], at)
        chosen, best = -1, np.inf
        for i in range(first_task[rank], first_task[rank + 1]):
            task = tasks[i]
            wish = wished[task] + period * done[task]
            if due[task] <= now and wish < best:
                end, waits = now + duration[task], False
                for j in range(first_task[rank], first_task[rank + 1]):
                    other = tasks[j]
                    if now < due[other] < end and wished[other] + period * done[other] < wish:
                        waits |= due[other] - now < patience[rank] * (end - due[other])
                if not waits:
                    chosen, best = task, wish
        if chosen < 0:
            continue
        start[chosen, done[chosen]] = now
        done[chosen] += 1
        left -= 1
        end = now + duration[chosen]
        makespan = max(makespan, end)
        for i in range(first_rank[chosen], first_rank[chosen + 1]):
            free[ranks[i]] = end
            level[ranks[i]] += held[chosen]
        for q in range(num_ranks):
            wake[q] = min(wake[q], max(end, free[q]))
    return makespan


def plain(placement: Placement, t: Tables) -> list[Policy]:
    """By the kinds of tasks, then by times; what comes last is tried first."""
    heads, order = np.zeros(len(t.duration)), np.argsort([task.kind is Kind.W for task in placement.tasks])
    for _ in placement.tasks:  # longest paths
        for task in order:
            for i in range(t.first_input[task], t.first_input[task + 1]):
                source = t.inputs[i]
                heads[task] = max(heads[task], heads[source] + t.duration[source] + t.lags[i])
    on = [t.tasks[t.first_task[r] : t.first_task[r + 1]] for r in range(len(t.limit))]
    period = float(max(t.duration[tasks].sum() for tasks in on))
    is_weight = np.array([task.kind is Kind.W for task in placement.tasks])
    is_forward, depth = t.backward >= 0, heads / max(heads.max(), 1)
    result = []
    for patience, extra, least in product((0.0, 0.5, 1.0, 2.0), (1.5, 1.0, 0.9), (0, 1, 2)):
        cap, patient = caps(t, heads, on, extra, least), np.full(len(t.limit), patience)
        for slack, later in product((1.0, 1.5, 2.0), (0.0, 1e9)):
            result.append(Policy(slack * heads + later * is_weight, period, cap, patient))
        for forward, way in product((0, 2), (-1, 1)):  # backwards are 1, what is deepest in the pipeline goes first
            place = np.where(is_weight, 3, np.where(is_forward, forward, 1))
            wished = place + 0.5 * depth * np.where(is_forward, -1, way)
            result.append(Policy(wished * period, 0.0, cap, patient))
    return result


def caps(t: Tables, heads: Floats, on: list[Integers], extra: float, least: int) -> Integers:
    """What fits on a rank, shared by its forwards: the sooner a backward follows, the less."""
    cap = np.full(len(t.duration), NEVER)
    for rank, tasks in enumerate(on):
        forwards = tasks[t.backward[tasks] >= 0]
        if not len(forwards):
            continue
        fitting = min(t.limit[rank] / max(t.held[forwards].mean(), 1), t.count * len(forwards))
        span = heads[t.backward[forwards]] - heads[forwards]
        shares = np.rint(least + (extra * fitting - least * len(forwards)) * span / max(span.sum(), 1))
        cap[forwards] = np.minimum(cap[forwards], np.maximum(shares, 1))
    return cap


def changed(policy: Policy, t: Tables, random: np.random.Generator) -> Policy:
    """One change: caps, priorities or patience of one task or of neighbours."""
    start, cap, patience = policy.start.copy(), policy.cap.copy(), policy.patience.copy()
    work = t.duration.sum() / len(t.limit)
    forwards = np.flatnonzero(t.backward >= 0)
    what, width = random.integers(5), 1 if random.random() < 0.5 else int(random.integers(1, len(t.limit) + 1))
    if what < 2 and len(forwards):
        first = random.integers(len(forwards))
        chosen = forwards[first : first + width]
        cap[chosen] = np.maximum(np.minimum(cap[chosen], t.count) + random.choice([-2, -1, 1, 2]), 1)
    elif what < 4:
        first = random.integers(len(start))
        start[first : first + width] += work * random.normal() * random.choice([0.3, 1.0, 3.0])
    elif random.random() < 0.3:
        patience[:] = np.maximum(patience + 0.5 * random.normal(), 0)
    else:
        first = random.integers(len(patience))
        patience[first : first + width] = np.maximum(patience[first : first + width] + 0.5 * random.normal(), 0)
    return Policy(start, policy.period, cap, patience)


def climb(placement: Placement, num_microbatches: int, limit_s: float = LIMIT_S) -> tuple[int, int]:
    """(makespan in µs of the best plan, simulated; policies tried)."""
    t, random = tables_of(placement, num_microbatches), np.random.default_rng(0)
    start = np.zeros((len(t.duration), t.count), np.int64)
    waiting = plain(placement, t)
    dispatch(t, waiting[0], start)  # compiled by now
    began, policy, least, best, num_tried = time.monotonic(), waiting[0], NEVER, start.copy(), 0
    while time.monotonic() - began < limit_s:
        tried = waiting.pop() if waiting else changed(policy, t, random)
        makespan = dispatch(t, tried, start)
        num_tried += 1
        if makespan <= least:
            if makespan < least:
                best[:] = start
            policy, least = tried, makespan
    if least == NEVER:
        return NEVER, num_tried
    return simulate(plan_of(placement, num_microbatches, best)).makespan_us, num_tried


def plan_of(placement: Placement, num_microbatches: int, start: Integers) -> Plan:
    orders: list[list[tuple[int, int, Op]]] = [[] for _ in range(placement.num_ranks)]
    for i, (task, component) in enumerate(zip(placement.tasks, placement.component_of, strict=True)):
        for k, at in enumerate(start[i].tolist()):
            op = Op(task.stage, task.kind, k * placement.num_components + component)
            for rank in task.ranks:
                orders[rank].append((at, i, op))
    return Plan(placement, num_microbatches, tuple(tuple(op for *_, op in sorted(row)) for row in orders))


def main() -> None:
    wanted = sys.argv[1:]
    for row in rows():
        if not wanted or row.name in wanted:
            makespan_us, num_tried = climb(row.placement, row.num_microbatches)
            print(f"{row.name:<22}{makespan_us:>14,}{num_tried:>10,} policies", flush=True)


if __name__ == "__main__":
    main()
