"""DynaPipe's planning, written from its paper: Jiang et al., EuroSys 2024, sections 4 and 5, and Algorithm 1.

Micro-batches: samples sorted by length; for several largest times T, a dynamic program finds the groups with the least
sum of times, each at most T and at most a rank's share of the memory; the one with the least sum + (ranks - 1) * T is
taken. Order: micro-batches are clustered by time, and the order of the clusters that simulates best is taken.
Schedule: in each cycle, each rank does one backward and one forward of those that arrived in the cycle before; a
forward waits while memory is short.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import permutations

import numpy as np
from numba import njit

from rota.batching.figures import Layout
from rota.batching.problem import BatchProblem
from rota.core.sizes import Size

_NUM_TIMES = 20
_NUM_CLUSTERS = 3


def groups_of(layout: Layout, lengths: Sequence[int], limit_bytes: int) -> list[list[int]]:
    """The micro-batches, as indices into `lengths`."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    ordered = np.array([lengths[i] for i in order], np.float64)
    ranks = layout.placement.num_ranks
    curve = layout.work().max(axis=0)
    held = max(curve.per_token for curve in layout.model.activation_bytes)
    share = limit_bytes / ranks
    longest = max(
        (curve * [1, rows * length, rows * length**2]).sum() for rows, length in _largest(ordered, held, share)
    )
    shortest = float((curve * [1, ordered[0], ordered[0] ** 2]).sum())
    best: tuple[float, np.ndarray] = np.inf, np.zeros(0, np.int64)
    for most in np.linspace(shortest, longest, _NUM_TIMES).tolist():
        total, begins = _split(ordered, curve, held, share, most)
        if (value := total + (ranks - 1) * most) < best[0]:
            best = value, begins
    groups, end = [], len(ordered)
    while end > 0:
        begin = int(best[1][end])
        groups.append(order[begin:end])
        end = begin
    return groups


def _largest(ordered: np.ndarray, held: float, share: float) -> Iterator[tuple[int, float]]:
    """(rows, length) of the largest group that begins at each sample and has room in a share of the memory."""
    for i, length in enumerate(ordered.tolist()):
        yield max(min(int(share / (held * length)), len(ordered) - i), 1), length


@njit(cache=True)
def _split(ordered, curve, held, share, most):  # type: ignore[no-untyped-def]
    """(the least sum of times of groups, where the last group begins of the first n samples)."""
    sums, begins = np.full(len(ordered) + 1, np.inf), np.zeros(len(ordered) + 1, np.int64)
    sums[0] = 0.0
    for end in range(1, len(ordered) + 1):
        for begin in range(end - 1, -1, -1):
            rows, length = end - begin, ordered[begin]
            time = curve[0] + curve[1] * rows * length + curve[2] * rows * length**2
            if rows > 1 and (held * rows * length > share or time > most):
                break
            if sums[begin] + time < sums[end]:
                sums[end], begins[end] = sums[begin] + time, begin
    return sums[-1], begins


def makespan_us(problem: BatchProblem) -> int:
    """The makespan of the best order of clusters, with the adaptive schedule."""
    times = problem.durations_us.sum(axis=1)
    clusters = _clusters(times)
    best = 1 << 60
    for arranged in permutations(clusters):
        sequence = [m for cluster in arranged for m in cluster]
        best = min(best, replay(problem, _cycles(problem, sequence)))
    return best


def _clusters(times: np.ndarray) -> list[list[int]]:
    """1-dimensional k-means from quantiles."""
    centers = np.quantile(times, np.linspace(0, 1, _NUM_CLUSTERS))
    nearest = np.zeros(len(times), np.int64)
    for _ in range(20):
        nearest = np.abs(times[:, None] - centers[None]).argmin(axis=1)
        centers = np.array(
            [times[nearest == c].mean() if (nearest == c).any() else centers[c] for c in range(len(centers))]
        )
    return [found for c in range(len(centers)) if (found := np.flatnonzero(nearest == c).tolist())]


def _cycles(problem: BatchProblem, sequence: list[int]) -> list[list[tuple[int, int]]]:
    """Per rank its ops (task, micro-batch), by cycles. W, which the paper does not split off, follows its backward."""
    roles, ranks = problem.roles.tolist(), problem.num_ranks
    forwards: list[deque[int]] = [deque(sequence if rank == 0 else ()) for rank in range(ranks)]
    backwards: list[deque[int]] = [deque() for _ in range(ranks)]
    level = [0] * ranks
    orders: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    left = 2 * ranks * len(sequence)
    while left:
        arriving: list[tuple[deque[int], int]] = []
        for rank, (forward, backward, weight) in enumerate(roles):
            if backwards[rank]:
                m = backwards[rank].popleft()
                level[rank] -= int(problem.held_bytes[m, forward])
                orders[rank] += [(backward, m), *([(weight, m)] if weight >= 0 else [])]
                left -= 1
                if rank:
                    arriving.append((backwards[rank - 1], m))
            if forwards[rank]:
                m = forwards[rank][0]
                held = int(problem.held_bytes[m, forward])
                if level[rank] + held <= problem.limits_bytes[rank]:
                    forwards[rank].popleft()
                    level[rank] += held
                    orders[rank].append((forward, m))
                    left -= 1
                    arriving.append((forwards[rank + 1] if rank + 1 < ranks else backwards[rank], m))
        for queue, m in arriving:
            queue.append(m)
    return orders


def replay(problem: BatchProblem, orders: list[list[tuple[int, int]]]) -> int:
    """The makespan of orders, each op as early as it can be."""
    inputs: list[list[tuple[int, int]]] = [[] for _ in range(problem.num_tasks)]
    for e, (source, target) in enumerate(problem.edges.tolist()):
        inputs[target].append((source, e))
    durations, lags = problem.durations_us.tolist(), problem.lags_us.tolist()
    ends: dict[tuple[int, int], int] = {}
    free, at = [0] * len(orders), [0] * len(orders)
    left, moved = sum(map(len, orders)), True
    while left and moved:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                task, m = order[at[rank]]
                if any((source, m) not in ends for source, _ in inputs[task]):
                    break
                ready = max((ends[source, m] + lags[m][e] for source, e in inputs[task]), default=0)
                free[rank] = ends[task, m] = max(free[rank], ready) + durations[m][task]
                at[rank], left, moved = at[rank] + 1, left - 1, True
    assert not left, "the orders wait in a cycle"
    return max(us + int(tail) for us, tail in zip(free, problem.tails_us, strict=True))


def sizes_of(groups: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Size]:
    """The padded size of each group."""
    return [Size.padded([lengths[i] for i in group]) for group in groups]
