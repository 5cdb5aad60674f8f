"""How early each op can start and how long its rank idles before it, whatever the order: heads, and backwards, tails.

Everything here is about one `Side`: the problem seen from the beginning or from the end of the step. Seen from the end,
time runs backwards: what an op held is free before it and what it freed is held, inputs become outputs, and the step
ends come first. So every argument about heads holds for tails too.

Heads are counted from an *origin*: the beginning of the step, or the first op of one rank.

A *place* is a task on one of its ranks. Arrays are indexed by [micro-batch, task] or [micro-batch, place], where
micro-batch k of a task is the k-th that it does, seen from this side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rota.core.stopping import look
from rota.search.compiled import loop
from rota.search.problem import NO_LIMIT, Flags, Integers, Problem, Rows

NEVER = -(1 << 60)  #: the head of an op that does not come after the origin
PLACE, TASK, SOURCE_PLACE, SOURCE_TASK, A, B, C = range(7)  #: the columns of `MemoryHeadroom.arcs`
_ROUNDS = 2  # how often the idle times of ranks are passed on to other ranks

Floats = NDArray[np.float64]


class SideTables(NamedTuple):
    """A `Side` for compiled loops; `first_x` and the field after it are as in `Rows`."""

    counts: Integers
    durations_us: Integers
    held_bytes: Integers
    needed_bytes: Integers
    first_input: Integers
    inputs: Integers
    order: Integers
    after: Flags
    component_of: Integers
    headroom_bytes: Integers
    grain_bytes: Integers
    first_place: Integers
    places: Integers
    parents: Integers


@dataclass(frozen=True)
class Side:
    """A problem seen from one end of the step; "after" and "before" are as seen from there."""

    counts: Integers  #: int64[num_tasks], micro-batches
    durations_us: Integers  #: int64[num_tasks]
    held_bytes: Integers  #: int64[num_tasks]
    peak_bytes: Integers  #: int64[num_tasks]
    inputs: Rows  #: one row per task: source, lag in µs, source, lag …
    order: Integers  #: int64[num_tasks], tasks in topological order
    after: Flags  #: bool[num_tasks, num_tasks]: [t, u] is set where u comes after t, directly or not
    component_of: Integers  #: int64[num_tasks]
    release_us: Integers  #: int64[num_tasks]: no op of the task starts before this
    headroom_bytes: Integers  #: int64[num_ranks]: what the rank's ops may hold, or NO_LIMIT
    grain_bytes: Integers  #: int64[num_ranks]: what the rank's ops hold is always a multiple of this
    places: Rows  #: one row per rank: its tasks, each after those that come before it

    @cached_property
    def needed_bytes(self) -> Integers:
        """int64[num_tasks]: what has to be free when an op of the task starts."""
        return np.maximum(self.held_bytes, 0) + self.peak_bytes

    @cached_property
    def parents(self) -> Integers:
        """int64[num_places]: the place's deepest ancestor on its rank, counted from the rank's first; -1: none."""
        parents = np.full(len(self.places.values), -1, np.int64)
        for rank, tasks in enumerate(self.places):
            before = self.after[np.ix_(tasks, tasks)]
            depth = before.sum(axis=0)
            for i in np.flatnonzero(depth):
                deepest = max(np.flatnonzero(before[:, i]), key=lambda j: (depth[j], j))
                parents[self.places.first[rank] + i] = deepest
        return parents

    @cached_property
    def tables(self) -> SideTables:
        """For compiled loops."""
        return SideTables(
            self.counts,
            self.durations_us,
            self.held_bytes,
            self.needed_bytes,
            self.inputs.first,
            self.inputs.values,
            self.order,
            self.after,
            self.component_of,
            self.headroom_bytes,
            self.grain_bytes,
            self.places.first,
            self.places.values,
            self.parents,
        )

    @cached_property
    def work_us(self) -> Integers:
        """int64[num_ranks]: duration of all of the rank's ops together."""
        sums = np.concatenate([[0], np.cumsum((self.counts * self.durations_us)[self.places.values])])
        return np.diff(sums[self.places.first])


class MemoryHeadroom(NamedTuple):
    """What a memory limit makes each place wait for, seen from one side; `memory_headroom.find_headroom` finds it.

    Each row of `arcs` has the columns PLACE, TASK, SOURCE_PLACE, SOURCE_TASK, A, B, C and says: before micro-batch k of
    the task starts, ceil((A + B k) / C) micro-batches of the source, but no more than k, have ended. The lines (a, b)
    of `most` and `least` say: before micro-batch k of the place, the rank works at most, and at least, a + b k µs.
    """

    arcs_first: Integers  #: int64[num_tasks + 1]: the arcs of task t are rows `arcs_first[t]` to `arcs_first[t + 1]`
    arcs: Integers  #: int64[num_arcs, 7]
    most: Floats  #: float64[num_places, num_prices, 2]
    least: Floats  #: float64[num_places, num_prices, 2]
    frees: Flags  #: bool[num_places]: the place frees memory, or comes after a place of its rank that does
    fill_us: Integers  #: int64[num_ranks]: the most work before the first of the rank's ops that `frees`


@dataclass(frozen=True)
class Heads:
    """Lower bounds for every order."""

    heads_us: Integers  #: int64[num_microbatches, num_tasks]: from the origin to the op's start
    idle_us: Integers  #: int64[num_microbatches, num_places]: idle time of the rank before the op


def both_sides(problem: Problem, step_ends: bool = True, limits: bool = True) -> tuple[Side, Side]:
    """From the beginning and from the end, with or without step ends and memory limits."""
    num_tasks, after = len(problem.counts), problem.after
    order = np.array(problem.topological, np.int64)
    position = np.argsort(order)
    headroom, grain, total = _headroom_and_grain(problem)
    if not limits:
        headroom[:] = NO_LIMIT
    component_of = problem.component_of
    forward = Side(
        counts=problem.counts,
        durations_us=problem.durations_us,
        held_bytes=problem.held_bytes,
        peak_bytes=problem.peak_bytes,
        inputs=problem.inputs,
        order=order,
        after=after,
        component_of=component_of,
        release_us=np.zeros(num_tasks, np.int64),
        headroom_bytes=headroom,
        grain_bytes=grain,
        places=_sorted(problem.tasks_on, position),
    )
    backward = Side(
        counts=problem.counts,
        durations_us=problem.durations_us,
        held_bytes=-problem.held_bytes,
        peak_bytes=problem.peak_bytes,
        inputs=problem.outputs,
        order=order[::-1].copy(),
        after=after.T.copy(),
        component_of=component_of,
        release_us=_step_end_tails(problem) if step_ends else np.zeros(num_tasks, np.int64),
        headroom_bytes=np.where(headroom == NO_LIMIT, NO_LIMIT, headroom - total),
        grain_bytes=grain,
        places=_sorted(problem.tasks_on, -position),
    )
    return forward, backward


def _headroom_and_grain(problem: Problem) -> tuple[Integers, Integers, Integers]:
    """int64[num_ranks] each: the limit, the greatest common divisor of what ops hold, what is held in the end."""
    held = problem.held_bytes
    grain = np.array([max(int(np.gcd.reduce(held[tasks], initial=0)), 1) for tasks in problem.tasks_on], np.int64)
    total = np.array([int((held[tasks] * problem.counts[tasks]).sum()) for tasks in problem.tasks_on], np.int64)
    return problem.limits_bytes.copy(), grain, total


def _sorted(tasks_on: Rows, position: Integers) -> Rows:
    return Rows(tasks_on.first, np.concatenate([tasks[np.argsort(position[tasks])] for tasks in tasks_on]))


def _step_end_tails(problem: Problem) -> Integers:
    """int64[num_tasks]: what follows any op of the task: its stage's and later reductions, its rank's optimizer steps.

    A rank reduces in the order in which the stages' last gradients are there, one stage after the other.
    """
    tails = np.zeros(len(problem.counts), np.int64)
    ends, after = problem.step_ends, problem.after
    for rank, here in enumerate(problem.tasks_on):
        own = ends.of_rank(rank)
        optimizers_us = ends.optimizers_us(rank)
        tails[here] = np.maximum(tails[here], optimizers_us)
        reducing = [end for end in own if len(ends.gradients_of(end))]
        lasts = [ends.gradients_of(end)[0] for end in reducing]
        for end in reducing:
            later = after[ends.gradients_of(end)][:, lasts].all(axis=0)
            later_us = ends.reduce_us[np.array(reducing)[later]].sum()
            mine = np.intersect1d(ends.gradients_of(end), here)  # the reduction waits for each of them
            tails[mine] = np.maximum(tails[mine], ends.reduce_us[end] + later_us + optimizers_us)
    return tails


def find_heads(side: Side, headroom: MemoryHeadroom, beginning: int | None = None, alone: bool = False) -> Heads:
    """Heads and idle times, counted from the step's beginning or from the first op of the rank `beginning`.

    Args:
        side: The problem, seen from one end.
        headroom: What memory limits make its places wait for.
        beginning: A rank; None counts from the beginning of the step.
        alone: Find the idle times of the rank `beginning` only, not those of all `ranks_after` it.
    """
    *_, last = _phases(side, headroom, beginning, alone)
    return last


def heads_by_phase(side: Side, headroom: MemoryHeadroom) -> list[tuple[Integers, Integers]]:
    """(heads, idle times) as `find_heads` has them from the step's beginning: first, and after each of its phases."""
    return [(heads.heads_us.copy(), heads.idle_us.copy()) for heads in _phases(side, headroom, None, False)]


def _phases(side: Side, headroom: MemoryHeadroom, beginning: int | None, alone: bool) -> Iterator[Heads]:
    """The same heads again and again, higher after each phase."""
    tables = side.tables
    heads = np.empty((int(side.counts.max(initial=1)), len(side.counts)), np.int64)
    idle = np.zeros((len(heads), len(side.places.values)), np.int64)
    heads[:] = side.release_us if beginning is None else NEVER
    ranks = np.arange(len(side.places))
    if beginning is not None:
        heads[:, side.places[beginning]] = 0
        ranks = np.array([beginning]) if alone else np.flatnonzero(ranks_after(side, beginning))
    found = Heads(heads, idle)
    yield found
    for _ in range(1 if alone else _ROUNDS):
        look()
        _pass_on(heads, tables, headroom)
        yield found
        _wait(heads, idle, ranks, tables, headroom)
        yield found
    if not alone:
        _pass_on(heads, tables, headroom)
        yield found


def ranks_after(side: Side, beginning: int) -> Flags:
    """bool[num_ranks]: the ranks all of whose tasks come after one of the rank `beginning`, and that rank itself."""
    own = side.places[beginning]
    after = side.after[own].any(axis=0) | (side.counts == 0)
    ranks = np.array([bool(after[tasks].all()) for tasks in side.places])
    ranks[beginning] = True
    return ranks


@loop
def _pass_on(heads, side, headroom):  # type: ignore[no-untyped-def]
    """Raises heads along inputs, along the micro-batches of each task, and along the arcs of memory."""
    counts, durations, first_input, inputs = side.counts, side.durations_us, side.first_input, side.inputs
    arcs_first, arcs = headroom.arcs_first, headroom.arcs
    for k in range(len(heads)):
        for task in side.order:
            if k >= counts[task]:
                continue
            head = heads[k, task]
            if k:
                head = max(head, heads[k - 1, task] + durations[task])
            for i in range(first_input[task], first_input[task + 1], 2):
                source = inputs[i]
                head = max(head, heads[k, source] + durations[source] + inputs[i + 1])
            for i in range(arcs_first[task], arcs_first[task + 1]):
                over = min(-((-arcs[i, A] - arcs[i, B] * k) // arcs[i, C]), k)
                if over > 0:
                    source = arcs[i, SOURCE_TASK]
                    head = max(head, heads[over - 1, source] + durations[source])
            heads[k, task] = head


@loop
def _wait(heads, idle, ranks, side, headroom):  # type: ignore[no-untyped-def]
    """Raises `idle` to the head less the most work before, and heads to `idle` and the least work before."""
    first, values, after, counts = side.first_place, side.places, side.after, side.counts
    arcs_first, arcs, most, least, frees, fills = headroom
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
                    over = min(-((-arcs[i, A] - arcs[i, B] * k) // arcs[i, C]), k)
                    if arcs[i, PLACE] == place and over > 0:
                        wait = max(wait, idle[over - 1, arcs[i, SOURCE_PLACE]])
                work = np.inf
                for p in range(num_prices):
                    work = min(work, most[place, p, 0] + most[place, p, 1] * k)
                wait = max(wait, heads[k, task] - int(np.floor(work + 1e-9)))
                idle[k, place] = wait
                work = 0.0
                for p in range(num_prices):
                    work = max(work, least[place, p, 0] + least[place, p, 1] * k)
                heads[k, task] = max(heads[k, task], wait + int(np.ceil(work - 1e-9)))
