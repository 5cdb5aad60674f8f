"""What a memory limit makes each op of a rank wait for, and how much the rank can work before it.

Seen from one rank, the micro-batches of a step are layers, and what it has done at any time is in each layer a closed
set of its tasks: one that contains, with a task, all that come before it. A price on memory (a Lagrange multiplier)
parts the layers from each other, and each then takes its best closed set on its own. For this the tasks before a task
are cut down to the deepest of them, so that they form a forest: that can only add sets, and weaken a bound.

A place is a task on one of its ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rota.search.bounds.view import Flags, View
from rota.search.problem import NO_LIMIT, Integers

_MOST_PRICES = 16
_ROUNDING = 1e-12  # of the numbers that are added; lines are moved by as much, to the safe side

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Room:
    """What memory makes each place wait for.

    `arcs` rows (place, task, source place, source task, a, b, c): before micro-batch k of the task starts, ceil((a +
    b k) / c) of the source, at most k, are over. `most[p, i]` and `least[p, i]`: lines (a, b), of which each says that
    before micro-batch k the rank works at most, and at least, a + b k. `frees[p]`: the place frees memory, or comes
    after one of the rank that does; before the first of these the rank works at most `fill_us`.
    """

    arcs_first: Integers
    arcs: Integers
    most: Floats
    least: Floats
    frees: Flags
    fill_us: Integers


def find_room(view: View) -> Room:
    """Depends on the placement alone, not on when anything starts."""
    prices, load = _prices(view), view.durations_us.astype(np.float64)
    places = (view.places.first, view.places.values, view.parents, view.after, view.counts)
    memory = (view.held_bytes, view.needed_bytes, view.room_bytes)
    arcs = _memory_arcs(*places, view.stream, *memory)
    arcs = arcs[np.argsort(arcs[:, 1], kind="stable")]
    first = np.searchsorted(arcs[:, 1], np.arange(len(view.counts) + 1)).astype(np.int64)
    most = _lines(*places, view.stream, *memory, view.grain_bytes, load, prices)
    least = -_lines(*places, view.stream, *memory, view.grain_bytes, -load, prices)
    frees = np.zeros(len(most), np.bool_)
    fill = _fills(*places, *memory, view.grain_bytes, load, prices, frees)
    return Room(first, arcs, most, least, frees, fill)


def _prices(view: View) -> Floats:
    """For each rank prices of a byte in µs, where a part of a chain of its tasks just pays."""
    prices = np.zeros((len(view.places.first) - 1, _MOST_PRICES))
    for rank in range(len(prices)):
        if view.room_bytes[rank] == NO_LIMIT:
            continue
        first, end = int(view.places.first[rank]), int(view.places.first[rank + 1])
        tasks, parents = view.places.values[first:end].tolist(), view.parents[first:end].tolist()
        found = set()
        for i in range(len(tasks)):
            work, memory, j = 0, 0, i
            while j >= 0:
                work += int(view.durations_us[tasks[j]])
                memory += int(view.held_bytes[tasks[j]])
                if work and memory:
                    found.add(work / abs(memory))
                j = parents[j]
        ordered = sorted(found)
        picked = np.linspace(0, len(ordered) - 1, min(len(ordered), _MOST_PRICES - 1)).astype(int)
        for i, at in enumerate(picked):
            prices[rank, i + 1] = ordered[at]
    return prices


@njit(cache=True)
def _best_closed(weights, parents, forced, times):  # type: ignore[no-untyped-def]
    """The largest weight of a closed set in a forest; `forced` 1: in it, -1: not. Trees count `times[root]`."""
    sums = np.zeros_like(weights)
    total = weights[0] * 0
    for i in range(len(weights) - 1, -1, -1):
        value = sums[i] + weights[i]
        if forced[i] < 0 or (forced[i] == 0 and value <= 0):
            continue
        if parents[i] >= 0:
            sums[parents[i]] += value
        else:
            total += value * times[i]
    return total


@njit(cache=True)
def _layer(i, tasks, after, stream, done, forced):  # type: ignore[no-untyped-def]
    """Fill `forced` for a layer in which place i is done (2), is next (1) or is still to come (0)."""
    task = tasks[i]
    for j in range(len(tasks)):
        other = tasks[j]
        forced[j] = 0
        if stream[other] != stream[task] or (done < 2 and (j == i or after[task, other])):
            forced[j] = -1
        elif done > 0 and (j == i or after[other, task]):
            forced[j] = 1


@njit(cache=True)
def _other_streams(i, tasks, stream, forced):  # type: ignore[no-untyped-def]
    for j in range(len(tasks)):
        forced[j] = -1 if stream[tasks[j]] == stream[tasks[i]] else 0


@njit(cache=True)
def _lines(first, values, all_parents, after, counts, stream, held, needed, limits, grains, load, prices):  # type: ignore[no-untyped-def]
    """For each place and price a line (a, b): before its micro-batch k, at most a + b k of `load` is done."""
    lines = np.zeros((len(values), prices.shape[1], 2))
    for rank in range(len(first) - 1):
        tasks, parents = values[first[rank] : first[rank + 1]], all_parents[first[rank] : first[rank + 1]]
        forced = np.zeros(len(tasks), np.int64)
        once, times = np.ones(len(tasks), np.int64), counts[tasks]
        for i in range(len(tasks)):
            task = tasks[i]
            count, free = counts[task], limits[rank]
            if free != NO_LIMIT:
                free = (free - needed[task]) // grains[rank] * grains[rank]
            for p in range(prices.shape[1]):
                price = prices[rank, p]
                weights = load[tasks] - price * held[tasks]
                _layer(i, tasks, after, stream, 2, forced)
                done = _best_closed(weights, parents, forced, once)
                _layer(i, tasks, after, stream, 1, forced)
                now = _best_closed(weights, parents, forced, once)
                _layer(i, tasks, after, stream, 0, forced)
                later = _best_closed(weights, parents, forced, once)
                _other_streams(i, tasks, stream, forced)
                others = _best_closed(weights, parents, forced, times)
                paid = price * free if price > 0 else 0.0
                a, b = paid + now + (count - 1) * later + others, done - later
                size = abs(paid) + abs(now) + count * (abs(later) + abs(done)) + abs(others)
                lines[first[rank] + i, p, 0] = a + _ROUNDING * size
                lines[first[rank] + i, p, 1] = b
    return lines


@njit(cache=True)
def _fills(first, values, all_parents, after, counts, held, needed, limits, grains, load, prices, frees):  # type: ignore[no-untyped-def]
    """Mark `frees`; for each rank the most work before the first of them, all streams together."""
    fills = np.zeros(len(first) - 1, np.int64)
    for rank in range(len(first) - 1):
        tasks, parents = values[first[rank] : first[rank + 1]], all_parents[first[rank] : first[rank + 1]]
        forced, need = np.zeros(len(tasks), np.int64), NO_LIMIT
        for i in range(len(tasks)):
            task = tasks[i]
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
            work = _best_closed(load[tasks] - price * held[tasks], parents, forced, counts[tasks])
            paid = price * free if price > 0 else 0.0
            best = min(best, (work + paid) + _ROUNDING * (work + abs(paid)))
        fills[rank] = int(np.floor(best + 1e-9))
    return fills


@njit(cache=True)
def _memory_arcs(first, values, all_parents, after, counts, stream, held, needed, limits):  # type: ignore[no-untyped-def]
    """See `Room.arcs`.

    If only y of the source are over when micro-batch k of the task starts, then the least that is held is y P + (k - y)
    Q + R + (count - k - 1) S, with one letter for each sort of layer: done, done but for the source, next, to come.
    """
    found = []
    for rank in range(len(first) - 1):
        if limits[rank] == NO_LIMIT:
            continue
        tasks, parents = values[first[rank] : first[rank + 1]], all_parents[first[rank] : first[rank + 1]]
        forced, sums = np.zeros(len(tasks), np.int64), np.zeros(3, np.int64)
        weights, once, times = -held[tasks], np.ones(len(tasks), np.int64), counts[tasks]
        for i in range(len(tasks)):
            task = tasks[i]
            _layer(i, tasks, after, stream, 2, forced)
            done = _best_closed(weights, parents, forced, once)
            _other_streams(i, tasks, stream, forced)
            free = limits[rank] - needed[task] + _best_closed(weights, parents, forced, times)
            for j in range(len(tasks)):
                source = tasks[j]
                if j == i or stream[source] != stream[task] or after[source, task]:
                    continue
                for state in range(3):
                    _layer(i, tasks, after, stream, state, forced)
                    for other in range(len(tasks)):
                        if other == j or after[source, tasks[other]]:
                            forced[other] = -1
                    sums[state] = _best_closed(weights, parents, forced, once)
                later, now, without = sums
                a, b = -free - now - (counts[task] - 1) * later, later - without
                if done > without and max(a, a + b * (counts[task] - 1)) > 0:
                    found.append((first[rank] + i, task, first[rank] + j, source, a, b, done - without))
    arcs = np.zeros((len(found), 7), np.int64)
    for i in range(len(found)):
        for j in range(7):
            arcs[i, j] = found[i][j]
    return arcs
