"""What the ops of a step really hold, transfers included: `rota.core.memory`'s account, on arrays."""

from __future__ import annotations

import numpy as np
from numba import njit

from rota.batching.dispatching import NEVER, Dispatch
from rota.batching.problem import BatchProblem, Integers

_TRANSFER_ENDS, _OP_ENDS, _TRANSFER_STARTS, _OP = range(4)  # events at one instant come in this order


def peaks_bytes(problem: BatchProblem, sequence: Integers, found: Dispatch) -> Integers:
    """int64[num_ranks]: the most that each rank holds at any time, without static bytes."""
    result = np.zeros(problem.num_ranks, np.int64)
    _fill(problem.tables, problem.edges, problem.edge_bytes, sequence, found.starts_us, found.orders, result)
    return result


@njit(cache=True, nogil=True)
def _fill(tables, edges, edge_bytes, sequence, starts, orders, result):  # type: ignore[no-untyped-def]
    """Merges a rank's ops with its transfers: those of one edge begin in the sequence, and end in it."""
    durations, held, peaks, lags = tables.durations_us, tables.held_bytes, tables.peak_bytes, tables.lags_us
    rank_of, first_on, count = tables.rank_of, tables.first_on, len(sequence)
    mine = np.zeros(len(edges), np.int64)  # edges that cross the rank's border
    begun, over = np.zeros(len(edges), np.int64), np.zeros(len(edges), np.int64)  # transfers of each
    done = np.zeros(len(rank_of), np.int64)
    for r in range(len(result)):
        num_mine = 0
        for e in range(len(edges)):
            source, target = rank_of[edges[e, 0]], rank_of[edges[e, 1]]
            if source != target and (source == r or target == r):
                mine[num_mine] = e
                num_mine += 1
                begun[e] = over[e] = 0
        level, highest, i, runs = 0, 0, 0, False
        num_ops = count * (first_on[r + 1] - first_on[r])
        while True:
            first, key = -1, NEVER
            if i < num_ops:
                t = orders[r, i]
                m = sequence[done[t]]
                key = 4 * starts[m, t] + _OP
                if runs and durations[m, t] > 0:
                    key += 4 * durations[m, t] + _OP_ENDS - _OP
            for j in range(num_mine):
                e = mine[j]
                u = edges[e, 0]
                if begun[e] < count:
                    n = sequence[begun[e]]
                    sent = 4 * (starts[n, u] + durations[n, u]) + _TRANSFER_STARTS
                    if sent < key:
                        first, key = e, sent
                if rank_of[u] == r and over[e] < begun[e]:
                    n = sequence[over[e]]
                    arrived = 4 * (starts[n, u] + durations[n, u] + lags[n, e]) + _TRANSFER_ENDS
                    if arrived < key:
                        first, key = e, arrived
            if key == NEVER:
                break
            if first >= 0 and key % 4 == _TRANSFER_STARTS:
                level += edge_bytes[sequence[begun[first]], first]
                begun[first] += 1
            elif first >= 0:
                level -= edge_bytes[sequence[over[first]], first]
                over[first] += 1
            elif runs:
                level += min(held[m, t], 0) - peaks[m, t]
                for j in range(num_mine):
                    if edges[mine[j], 1] == t:
                        level -= edge_bytes[m, mine[j]]
                done[t] += 1
                i, runs = i + 1, False
            else:
                level += max(held[m, t], 0) + peaks[m, t]
                runs = True
            highest = max(highest, level)
        result[r] = highest
