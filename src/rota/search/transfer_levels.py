"""What each rank holds at its peak, transfers included, for known start times: `rota.core.timeline`'s answer, compiled.

A rank holds what it sends from the op's end until the transfer ends, and what it receives from the transfer's start to
the end of the op that reads it. So these levels depend on times, not on orders alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from rota.compiled import inner, int64, quick
from rota.core.placement import Placement
from rota.core.tasks import scalar
from rota.search.problem import NO_LIMIT, Integers, Orders, Problem
from rota.search.timing import Tables

# The order of events at one instant, as in `rota.core.timeline`.
_TRANSFER_ENDS, _OP_ENDS, _TRANSFER_STARTS, _OP = range(4)


class Transfers(NamedTuple):
    """The bytes that ops and transfers hold, for compiled loops."""

    limits_bytes: Integers  #: int64[num_ranks]: what ops and transfers may hold, or NO_LIMIT
    at_start_bytes: Integers  #: int64[...], beside `Tables.on`: what an op of the task takes on the rank when it starts
    at_end_bytes: Integers  #: int64[...], beside `Tables.on`: its change when the op ends; less than 0: it frees
    first_carried: Integers  #: int64[num_ranks + 1]: row r of `carried` is `first_carried[r]` to `first_carried[r + 1]`
    carried: Integers  #: int64[..., 6]: bytes; task and µs after its end, from when and until when; is it sent

    @classmethod
    def of(cls, problem: Problem) -> Transfers:
        """The tables of a problem."""
        placement, lowered = problem.placement, problem.lowered
        rows: list[list[tuple[int, ...]]] = [[] for _ in range(placement.num_ranks)]
        received = np.zeros((placement.num_ranks, len(placement.tasks)), np.int64)
        for item in lowered.carried:
            if not item.is_sent:  # freed by the op that reads it
                received[item.rank, item.until.op] += item.num_bytes
            if item.since != item.until:
                rows[item.rank].append((item.num_bytes, *item.since, *item.until, item.is_sent))
        on, ranks = problem.tasks_on.values, np.repeat(np.arange(placement.num_ranks), np.diff(problem.tasks_on.first))
        held, peak = problem.held_bytes[on], problem.peak_bytes[on]
        carried = np.array([item for row in rows for item in row], np.int64).reshape(-1, 6)
        first = np.array([0, *accumulate(map(len, rows))], np.int64)
        at_end = np.minimum(held, 0) - peak - received[ranks, on]
        return cls(problem.limits_bytes, np.maximum(held, 0) + peak, at_end, first, carried)


@quick
def peaks_with_transfers(tables: Tables, transfers: Transfers, orders: Orders, starts_us: Integers) -> Integers:
    """int64[num_ranks]: the most bytes held at once; 0 where a rank has no limit."""
    num_ranks = len(tables.first_op) - 1
    peaks, begun = np.zeros(num_ranks, np.int64), np.zeros(len(tables.durations_us), np.int64)
    at_start, at_end = np.zeros_like(begun), np.zeros_like(begun)
    for r in range(num_ranks):
        if transfers.limits_bytes[r] == NO_LIMIT:
            continue
        num_events = 2 * (tables.first_op[r + 1] - tables.first_op[r])
        for i in range(tables.first_on[r], tables.first_on[r + 1]):
            task = tables.on[i]
            at_start[task], at_end[task] = transfers.at_start_bytes[i], transfers.at_end_bytes[i]
            begun[task] = 0
        for i in range(transfers.first_carried[r], transfers.first_carried[r + 1]):
            since = transfers.carried[i, 1]
            num_events += (1 + transfers.carried[i, 5]) * (tables.first_node[since + 1] - tables.first_node[since])
        keys, changes = np.empty(num_events, np.int64), np.empty(num_events, np.int64)
        n = 0
        for i in range(tables.first_op[r], tables.first_op[r + 1]):
            task = orders[i]
            start = starts_us[tables.first_node[task] + begun[task]]
            begun[task] += 1
            duration = tables.durations_us[task]
            keys[n], changes[n] = 4 * start + _OP, at_start[task]
            keys[n + 1] = 4 * (start + duration) + (_OP_ENDS if duration else _OP)
            changes[n + 1] = at_end[task]
            n += 2
        for i in range(transfers.first_carried[r], transfers.first_carried[r + 1]):
            num_bytes, is_sent = transfers.carried[i, 0], transfers.carried[i, 5]
            since, until = transfers.carried[i, 1], transfers.carried[i, 3]
            since_lag = transfers.carried[i, 2] + tables.durations_us[since]
            until_lag = transfers.carried[i, 4] + tables.durations_us[until]
            for k in range(tables.first_node[since + 1] - tables.first_node[since]):
                begin = starts_us[tables.first_node[since] + k] + since_lag
                keys[n], changes[n] = 4 * begin + _TRANSFER_STARTS, num_bytes
                n += 1
                if is_sent:
                    end = starts_us[tables.first_node[until] + k] + until_lag
                    keys[n], changes[n] = 4 * end + _TRANSFER_ENDS, -num_bytes
                    n += 1
        level = int64(0)
        for i in in_order(keys):  # stable: ops at one instant stay in the rank's order
            level += changes[i]
            peaks[r] = max(peaks[r], level)
    return peaks


@inner
def in_order(keys: Integers) -> Integers:
    """int64[num_keys]: the indexes of the keys in ascending order, by merge sort; equal keys stay in their sequence."""
    num_keys, width = len(keys), 1
    order, merged = np.empty(num_keys, np.int64), np.empty(num_keys, np.int64)
    for i in range(num_keys):
        order[i] = i
    while width < num_keys:
        for first in range(0, num_keys, 2 * width):
            middle, end = min(first + width, num_keys), min(first + 2 * width, num_keys)
            left, right = first, middle
            for i in range(first, end):
                if right == end or (left < middle and keys[order[left]] <= keys[order[right]]):
                    merged[i] = order[left]
                    left += 1
                else:
                    merged[i] = order[right]
                    right += 1
        order, merged = merged, order
        width *= 2
    return order


def counting_transfers(problem: Problem) -> Problem:
    """The same problem, where each task's peak also has what its rank must hold of transfers at that time.

    While an op runs, its rank holds what the op reads from other ranks, and at its end what it sends, if that takes
    time. Every plan within the limits is within them here too, for these bytes are only a part of what transfers hold.
    """
    received, sent = transferred_bytes(problem.original)
    tasks = []
    for t, task in enumerate(problem.original.tasks):
        held, peak = scalar(task.held_bytes), scalar(task.peak_bytes)
        taken = max(held, 0)
        needed = (max(taken + peak + received[t, rank], held + sent[t, rank]) for rank in task.ranks)
        tasks.append(replace(task, peak_bytes=min(needed) - taken))  # a task's peak is the same on all its ranks
    return replace(problem, original=replace(problem.original, tasks=tuple(tasks)))


def transferred_bytes(placement: Placement) -> tuple[Counter[tuple[int, int]], Counter[tuple[int, int]]]:
    """By (task, rank): what an op reads from other ranks, and what it sends to them, if that takes time."""
    received: Counter[tuple[int, int]] = Counter()
    sent: Counter[tuple[int, int]] = Counter()
    for route in placement.routes:
        received[route.target, route.receiver] += scalar(route.num_bytes)
        if route.duration_us != 0:
            sent[route.source, route.sender] += scalar(route.num_bytes)
    return received, sent
