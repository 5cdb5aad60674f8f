"""What a memory limit makes each op of a rank wait for, and how much the rank can work before it.

Seen from one rank, the micro-batches of a step are layers. At any time, what the rank has done in a layer is a closed
set of its tasks: a set that contains, with each task, all tasks before it. A price on memory (a Lagrange multiplier)
separates the layers, and each layer then takes its best closed set on its own. For this, of the tasks before a task
only the deepest is kept, so that they form a forest: that can only add sets, and so weaken a bound.
"""

from __future__ import annotations

import numpy as np

from rota.compiled import inner, int64, quick
from rota.core.stopping import look
from rota.search.bounds.heads_tails import PLACE, SOURCE_PLACE, SOURCE_TASK, TASK, A, B, C, MemoryHeadroom, Side
from rota.search.problem import NO_LIMIT, Flags, Floats, Integers

_MOST_PRICES = 16
_TO_COME, _NEXT, _DONE = int64(0), int64(1), int64(2)  # states of a place in a layer
_ROUNDING = 1e-12  # relative to the numbers that are added: lines are moved by this much to the safe side


def find_headroom(side: Side) -> MemoryHeadroom:
    """This depends on the placement alone, not on when anything starts."""
    prices, load = prices_of(side), side.durations_us.astype(np.float64)
    look()
    arcs = _memory_arcs(side)
    arcs = arcs[np.argsort(arcs[:, TASK], kind="stable")]
    first = np.searchsorted(arcs[:, TASK], np.arange(len(side.counts) + 1)).astype(np.int64)
    most, least = _lines(side, load, prices), -_lines(side, -load, prices)
    frees = np.zeros(len(most), np.bool_)
    fill = _fills(side, load, prices, frees)
    return MemoryHeadroom(first, arcs, most, least, frees, fill)


def prices_of(side: Side) -> Floats:
    """float64[num_ranks, _MOST_PRICES]: prices of a byte in µs at which a part of a chain of tasks just pays."""
    prices = np.zeros((side.num_ranks, _MOST_PRICES))
    for rank in range(len(prices)):
        if side.headroom_bytes[rank] == NO_LIMIT:
            continue
        tasks, first = side.tasks_on(rank).tolist(), side.first_place
        parents = side.parents[first[rank] : first[rank + 1]].tolist()
        candidates = set()
        for i in range(len(tasks)):
            work, memory, j = 0, 0, i
            while j >= 0:
                work += int(side.durations_us[tasks[j]])
                memory += int(side.held_bytes[tasks[j]])
                if work and memory:
                    candidates.add(work / abs(memory))
                j = parents[j]
        ordered = sorted(candidates)
        picked = np.linspace(0, len(ordered) - 1, min(len(ordered), _MOST_PRICES - 1)).astype(int)
        for i, index in enumerate(picked):
            prices[rank, i + 1] = ordered[index]
    return prices


def price_of_fill(side: Side, rank: int) -> int:
    """Which of the rank's prices makes `MemoryHeadroom.fill_us` least."""
    fills, prices, load = [], prices_of(side), side.durations_us.astype(np.float64)
    for price in range(_MOST_PRICES):
        frees = np.zeros(len(side.places), np.bool_)
        only = np.ascontiguousarray(prices[:, price : price + 1])
        fills.append(int(_fills(side, load, only, frees)[rank]))
    return fills.index(min(fills))


@inner
def _best_closed(weights: Floats, parents: Integers, forced: Integers, times: Integers) -> float:
    """The largest weight of a closed set in a forest; `forced` 1: in it, -1: not. Trees count `times[root]` times."""
    sums = np.zeros_like(weights)
    total = 0.0
    for i in range(len(weights) - 1, -1, -1):
        value = sums[i] + weights[i]
        if forced[i] < 0 or (forced[i] == 0 and value <= 0):
            continue
        if parents[i] >= 0:
            sums[parents[i]] += value
        else:
            total += value * times[i]
    return total


@inner
def _layer(i: int, tasks: Integers, after: Flags, component_of: Integers, state: int, forced: Integers) -> None:
    """Fills `forced` for a layer in which place i is in this state."""
    task = tasks[i]
    for j in range(len(tasks)):
        other = tasks[j]
        forced[j] = 0
        if component_of[other] != component_of[task] or (state < _DONE and (j == i or after[task, other])):
            forced[j] = -1
        elif state > _TO_COME and (j == i or after[other, task]):
            forced[j] = 1


@inner
def _other_components(i: int, tasks: Integers, component_of: Integers, forced: Integers) -> None:
    """Fills `forced` for all layers of components other than that of place i."""
    for j in range(len(tasks)):
        forced[j] = -1 if component_of[tasks[j]] == component_of[tasks[i]] else 0


@quick
def _lines(side: Side, load: Floats, prices: Floats) -> Floats:
    """float64[num_places, num_prices, 2], lines (a, b): before micro-batch k, at most a + b k of `load` is done."""
    first, values, all_parents, after, counts = side.first_place, side.places, side.parents, side.after, side.counts
    held, needed, limits, grains = side.held_bytes, side.needed_bytes, side.headroom_bytes, side.grain_bytes
    component_of = side.component_of
    lines = np.zeros((len(values), prices.shape[1], 2))
    for rank in range(len(first) - 1):
        tasks, parents = values[first[rank] : first[rank + 1]], all_parents[first[rank] : first[rank + 1]]
        forced = np.zeros(len(tasks), np.int64)
        once, times, weights = np.empty(len(tasks), np.int64), np.empty(len(tasks), np.int64), np.empty(len(tasks))
        for i in range(len(tasks)):
            once[i], times[i] = 1, counts[tasks[i]]
        for i in range(len(tasks)):
            task = tasks[i]
            count, free = counts[task], limits[rank]
            if free != NO_LIMIT:
                free = (free - needed[task]) // grains[rank] * grains[rank]
            for p in range(prices.shape[1]):
                price = prices[rank, p]
                for j in range(len(tasks)):
                    weights[j] = load[tasks[j]] - price * held[tasks[j]]
                _layer(i, tasks, after, component_of, _DONE, forced)
                done = _best_closed(weights, parents, forced, once)
                _layer(i, tasks, after, component_of, _NEXT, forced)
                now = _best_closed(weights, parents, forced, once)
                _layer(i, tasks, after, component_of, _TO_COME, forced)
                later = _best_closed(weights, parents, forced, once)
                _other_components(i, tasks, component_of, forced)
                others = _best_closed(weights, parents, forced, times)
                paid = price * free if price > 0 else 0.0
                a, b = paid + now + (count - 1) * later + others, done - later
                size = abs(paid) + abs(now) + count * (abs(later) + abs(done)) + abs(others)
                lines[first[rank] + i, p, 0] = a + _ROUNDING * size
                lines[first[rank] + i, p, 1] = b
    return lines


@quick
def _fills(side: Side, load: Floats, prices: Floats, frees: Flags) -> Integers:
    """Marks `frees`; int64[num_ranks]: the most work before the first of them, all components together."""
    first, values, all_parents, after, counts = side.first_place, side.places, side.parents, side.after, side.counts
    held, needed, limits, grains = side.held_bytes, side.needed_bytes, side.headroom_bytes, side.grain_bytes
    fills = np.zeros(len(first) - 1, np.int64)
    for rank in range(len(first) - 1):
        tasks, parents = values[first[rank] : first[rank + 1]], all_parents[first[rank] : first[rank + 1]]
        forced, need = np.zeros(len(tasks), np.int64), NO_LIMIT
        times, weights = np.empty(len(tasks), np.int64), np.empty(len(tasks))
        for i in range(len(tasks)):
            task = tasks[i]
            times[i] = counts[task]
            free = counts[task] > 0 and held[task] < 0
            for j in range(i):
                free = free or (forced[j] < 0 and after[tasks[j], task])
            if free:
                forced[i] = -1
                frees[first[rank] + i] = True
                need = min(need, needed[task])
        if need == NO_LIMIT:
            continue
        free = limits[rank]
        if free != NO_LIMIT:
            free = (free - need) // grains[rank] * grains[rank]
        best = np.inf
        for p in range(prices.shape[1]):
            price = prices[rank, p]
            for i in range(len(tasks)):
                weights[i] = load[tasks[i]] - price * held[tasks[i]]
            work = _best_closed(weights, parents, forced, times)
            paid = price * free if price > 0 else 0.0
            best = min(best, (work + paid) + _ROUNDING * (work + abs(paid)))
        fills[rank] = int(np.floor(best + 1e-9))
    return fills


@quick
def _memory_arcs(side: Side) -> Integers:
    """int64[num_arcs, 7]: see `MemoryHeadroom.arcs`.

    If only y of the source are over when micro-batch k of the task starts, then at least y P + (k - y) Q + R + (count -
    k - 1) S bytes are held, with one letter for each sort of layer: done, done except for the source, next, to come.
    """
    first, values, all_parents, after, counts = side.first_place, side.places, side.parents, side.after, side.counts
    held, needed, limits, component_of = side.held_bytes, side.needed_bytes, side.headroom_bytes, side.component_of
    arcs, num_arcs = np.empty((16, 7), np.int64), 0
    for rank in range(len(first) - 1):
        if limits[rank] == NO_LIMIT:
            continue
        tasks, parents = values[first[rank] : first[rank + 1]], all_parents[first[rank] : first[rank + 1]]
        forced, sums = np.zeros(len(tasks), np.int64), np.zeros(3, np.int64)
        weights, once, times = np.empty(len(tasks)), np.empty(len(tasks), np.int64), np.empty(len(tasks), np.int64)
        for i in range(len(tasks)):
            weights[i], once[i], times[i] = -held[tasks[i]], 1, counts[tasks[i]]
        for i in range(len(tasks)):
            task = tasks[i]
            _layer(i, tasks, after, component_of, _DONE, forced)
            done = int64(_best_closed(weights, parents, forced, once))
            _other_components(i, tasks, component_of, forced)
            free = limits[rank] - needed[task] + int64(_best_closed(weights, parents, forced, times))
            for j in range(len(tasks)):
                source = tasks[j]
                if j == i or component_of[source] != component_of[task] or after[source, task]:
                    continue
                for state in range(3):
                    _layer(i, tasks, after, component_of, int64(state), forced)
                    for other in range(len(tasks)):
                        if other == j or after[source, tasks[other]]:
                            forced[other] = -1
                    sums[state] = int64(_best_closed(weights, parents, forced, once))
                later, now, without = sums[0], sums[1], sums[2]
                a, b = -free - now - (counts[task] - 1) * later, later - without
                if done > without and max(a, a + b * (counts[task] - 1)) > 0:
                    if num_arcs == len(arcs):
                        arcs = _longer(arcs)
                    arcs[num_arcs, PLACE], arcs[num_arcs, TASK] = first[rank] + i, task
                    arcs[num_arcs, SOURCE_PLACE], arcs[num_arcs, SOURCE_TASK] = first[rank] + j, source
                    arcs[num_arcs, A], arcs[num_arcs, B], arcs[num_arcs, C] = a, b, done - without
                    num_arcs += 1
    return arcs[:num_arcs]


@inner
def _longer(rows: Integers) -> Integers:
    """The same rows, and as many again, which are not set."""
    longer = np.empty((2 * len(rows), rows.shape[1]), rows.dtype)
    for i in range(len(rows)):
        for j in range(rows.shape[1]):
            longer[i, j] = rows[i, j]
    return longer
