"""How early each op can start and how long a rank has to be idle before it, whatever the order.

Arrays are indexed by [micro-batch, task] or [micro-batch, place]; micro-batch k of a task is the k-th that it does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from rota.search.bounds.memory_headroom import Room
from rota.search.bounds.view import Flags, View
from rota.search.problem import Integers

NEVER = -(1 << 60)  #: the head of an op that does not come after what heads are counted from
_ROUNDS = 2  # how often what ranks wait for is passed on to others


@dataclass(frozen=True)
class Waits:
    """`heads_us[k, t]`: how long after the beginning the op starts; `idle_us[k, p]`: idle before it; each at least."""

    heads_us: Integers
    idle_us: Integers


def waits(view: View, room: Room, beginning: int | None = None, alone: bool = False) -> Waits:
    """Counted from the step's beginning, or from that of the first op of the rank `beginning`.

    `alone`: idle times of that rank only. Else they are also known of each rank that `reached` tells.
    """
    heads = np.empty((int(view.counts.max(initial=1)), len(view.counts)), np.int64)
    idle = np.zeros((len(heads), len(view.places.values)), np.int64)
    heads[:] = view.release_us if beginning is None else NEVER
    ranks = np.arange(len(view.places.first) - 1)
    if beginning is not None:
        heads[:, view.tasks_on(beginning)] = 0
        ranks = np.array([beginning]) if alone else np.flatnonzero(reached(view, beginning))
    graph = (view.counts, view.durations_us, view.order, view.inputs.first, view.inputs.values)
    places = (view.places.first, view.places.values, view.after, view.counts)
    for _ in range(1 if alone else _ROUNDS):
        _pass_on(heads, *graph, room.arcs_first, room.arcs)
        _wait(heads, idle, ranks, *places, room.arcs_first, room.arcs, room.most, room.least, room.frees, room.fill_us)
    if not alone:
        _pass_on(heads, *graph, room.arcs_first, room.arcs)
    return Waits(heads, idle)


def reached(view: View, beginning: int) -> Flags:
    """The ranks all of whose tasks come after one of the rank `beginning`; the rank itself is one."""
    own = view.tasks_on(beginning)
    after = view.after[own].any(axis=0) | (view.counts == 0)
    ranks = np.array([bool(after[view.tasks_on(rank)].all()) for rank in range(len(view.places.first) - 1)])
    ranks[beginning] = True
    return ranks


@njit(cache=True)
def _pass_on(heads, counts, durations, order, inputs_first, inputs, arcs_first, arcs):  # type: ignore[no-untyped-def]
    """Raise heads along inputs, along the micro-batches of each task, and along the arcs of memory."""
    for k in range(len(heads)):
        for task in order:
            if k >= counts[task]:
                continue
            head = heads[k, task]
            if k:
                head = max(head, heads[k - 1, task] + durations[task])
            for i in range(inputs_first[task], inputs_first[task + 1], 2):
                source = inputs[i]
                head = max(head, heads[k, source] + durations[source] + inputs[i + 1])
            for i in range(arcs_first[task], arcs_first[task + 1]):
                over = min(-((-arcs[i, 4] - arcs[i, 5] * k) // arcs[i, 6]), k)
                if over > 0:
                    source = arcs[i, 3]
                    head = max(head, heads[over - 1, source] + durations[source])
            heads[k, task] = head


@njit(cache=True)
def _wait(heads, idle, ranks, first, values, after, counts, arcs_first, arcs, most, least, frees, fills):  # type: ignore[no-untyped-def]
    """Raise `idle` to head less most work before; raise heads to idle and least work before."""
    num_prices = most.shape[1]
    for rank in ranks:
        at_once = at_free = -NEVER
        for place in range(first[rank], first[rank + 1]):
            if counts[values[place]]:
                at_once = min(at_once, heads[0, values[place]])
                if frees[place]:
                    at_free = min(at_free, heads[0, values[place]])
        for k in range(len(heads)):
            for place in range(first[rank], first[rank + 1]):
                task = values[place]
                if k >= counts[task]:
                    continue
                wait = max(idle[k, place], at_once)
                if frees[place]:
                    wait = max(wait, at_free - fills[rank])
                if k:
                    wait = max(wait, idle[k - 1, place])
                for other in range(first[rank], place):
                    if after[values[other], task]:
                        wait = max(wait, idle[k, other])
                for i in range(arcs_first[task], arcs_first[task + 1]):
                    over = min(-((-arcs[i, 4] - arcs[i, 5] * k) // arcs[i, 6]), k)
                    if arcs[i, 0] == place and over > 0:
                        wait = max(wait, idle[over - 1, arcs[i, 2]])
                work = np.inf
                for p in range(num_prices):
                    work = min(work, most[place, p, 0] + most[place, p, 1] * k)
                wait = max(wait, heads[k, task] - int(np.floor(work + 1e-9)))
                idle[k, place] = wait
                work = 0.0
                for p in range(num_prices):
                    work = max(work, least[place, p, 0] + least[place, p, 1] * k)
                heads[k, task] = max(heads[k, task], wait + int(np.ceil(work - 1e-9)))
