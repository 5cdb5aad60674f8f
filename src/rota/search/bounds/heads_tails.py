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
from typing import NamedTuple

import numpy as np

from rota.compiled import quick
from rota.core.stopping import look
from rota.search.problem import NO_LIMIT, Flags, Floats, Integers, Problem, Rows

NEVER = -(1 << 60)  #: the head of an op that does not come after the origin
PLACE, TASK, SOURCE_PLACE, SOURCE_TASK, A, B, C = range(7)  #: the columns of `MemoryHeadroom.arcs`
_ROUNDS = 2  # how often the idle times of ranks are passed on to other ranks


class Side(NamedTuple):
    """A problem seen from one end of the step; "after" and "before" are as seen from there.

    `first_x` and the field after it are as in `Rows`.
    """

    counts: Integers  #: int64[num_tasks], micro-batches
    durations_us: Integers  #: int64[num_tasks]
    held_bytes: Integers  #: int64[num_tasks]
    needed_bytes: Integers  #: int64[num_tasks]: what has to be free when an op of the task starts
    first_input: Integers
    inputs: Integers  #: per task: source, lag in µs, source, lag …
    order: Integers  #: int64[num_tasks], tasks in topological order
    after: Flags  #: bool[num_tasks, num_tasks]: [t, u] is set where u comes after t, directly or not
    component_of: Integers  #: int64[num_tasks]
    release_us: Integers  #: int64[num_tasks]: no op of the task starts before this
    headroom_bytes: Integers  #: int64[num_ranks]: what the rank's ops may hold, or NO_LIMIT
    grain_bytes: Integers  #: int64[num_ranks]: what the rank's ops hold is always a multiple of this
    first_place: Integers
    places: Integers  #: per rank: its tasks, each after those that come before it
    parents: Integers  #: int64[num_places]: its deepest ancestor on its rank, counted from the rank's first; -1: none

    @property
    def num_ranks(self) -> int:
        """Number of ranks; shared links count as ranks."""
        return len(self.first_place) - 1

    def places_on(self, rank: int) -> range:
        """The places of a rank."""
        return range(int(self.first_place[rank]), int(self.first_place[rank + 1]))

    def tasks_on(self, rank: int) -> Integers:
        """The tasks of a rank, each after those that come before it."""
        return self.places[self.first_place[rank] : self.first_place[rank + 1]]

    def work_us(self, rank: int) -> int:
        """Duration of all of the rank's ops together."""
        tasks = self.tasks_on(rank)
        return int((self.counts[tasks] * self.durations_us[tasks]).sum())


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
    held, order = problem.held_bytes, np.array(problem.topological, np.int64)
    in_the_end = np.array([(held[tasks] * problem.counts[tasks]).sum() for tasks in problem.tasks_on], np.int64)
    grain = np.array([max(int(np.gcd.reduce(held[tasks], initial=0)), 1) for tasks in problem.tasks_on], np.int64)
    headroom = problem.limits_bytes if limits else np.full_like(problem.limits_bytes, NO_LIMIT)
    places, parents = _places(problem.tasks_on, np.argsort(order), problem.after)
    first = Side(
        problem.counts,
        problem.durations_us,
        held,
        np.maximum(held, 0) + problem.peak_bytes,
        problem.inputs.first,
        problem.inputs.values,
        order,
        problem.after,
        problem.component_of,
        np.zeros_like(order),
        headroom,
        grain,
        problem.tasks_on.first,
        places,
        parents,
    )
    after = problem.after.T.copy()
    places, parents = _places(problem.tasks_on, -np.argsort(order), after)
    last = first._replace(
        held_bytes=-held,
        needed_bytes=np.maximum(-held, 0) + problem.peak_bytes,
        first_input=problem.outputs.first,
        inputs=problem.outputs.values,
        order=order[::-1].copy(),
        after=after,
        release_us=_step_end_tails(problem) if step_ends else np.zeros_like(order),
        headroom_bytes=np.where(headroom == NO_LIMIT, NO_LIMIT, headroom - in_the_end),
        places=places,
        parents=parents,
    )
    return first, last


def _places(tasks_on: Rows, position: Integers, after: Flags) -> tuple[Integers, Integers]:
    """`Side.places` and `Side.parents`: each rank's tasks by position, and the deepest ancestor of each."""
    rows = [tasks[np.argsort(position[tasks])] for tasks in tasks_on]
    parents = []
    for tasks in rows:
        before = after[np.ix_(tasks, tasks)]
        depth = before.sum(axis=0)
        for i in range(len(tasks)):
            parents.append(max(np.flatnonzero(before[:, i]), key=lambda j: (depth[j], j), default=-1))
    return np.concatenate(rows), np.array(parents, np.int64)


def _step_end_tails(problem: Problem) -> Integers:
    """int64[num_tasks]: what follows any op of the task: its stage's and later reductions, its rank's optimizer steps.

    A rank reduces in the order in which the stages' last gradients are there, one stage after the other.
    """
    tails = np.zeros(len(problem.counts), np.int64)
    ends, after = problem.step_ends, problem.after
    for rank, tasks in enumerate(problem.tasks_on):
        optimizers_us = ends.optimizers_us(rank)
        tails[tasks] = np.maximum(tails[tasks], optimizers_us)
        reducing = [end for end in ends.of_rank(rank) if len(ends.gradients_of(end))]
        lasts = [ends.gradients_of(end)[0] for end in reducing]
        for end in reducing:
            later = after[ends.gradients_of(end)][:, lasts].all(axis=0)
            later_us = ends.reduce_us[np.array(reducing)[later]].sum()
            awaited = np.intersect1d(ends.gradients_of(end), tasks)  # the reduction waits for each of them
            tails[awaited] = np.maximum(tails[awaited], ends.reduce_us[end] + later_us + optimizers_us)
    return tails


def find_heads(side: Side, headroom: MemoryHeadroom, beginning: int | None = None, alone: bool = False) -> Heads:
    """Heads and idle times, counted from the step's beginning or from the first op of the rank `beginning`.

    `alone`: the idle times of the rank `beginning` only, not those of all `ranks_after` it.
    """
    *_, last = _phases(side, headroom, beginning, alone)
    return last


def heads_by_phase(side: Side, headroom: MemoryHeadroom) -> list[Heads]:
    """As `find_heads` has them from the step's beginning: first, and after each of its phases."""
    return [Heads(heads.heads_us.copy(), heads.idle_us.copy()) for heads in _phases(side, headroom, None, False)]


def _phases(side: Side, headroom: MemoryHeadroom, beginning: int | None, alone: bool) -> Iterator[Heads]:
    """The same heads again and again, higher after each phase."""
    heads = np.empty((int(side.counts.max(initial=1)), len(side.counts)), np.int64)
    idle = np.zeros((len(heads), len(side.places)), np.int64)
    heads[:] = side.release_us if beginning is None else NEVER
    ranks = np.arange(side.num_ranks)
    if beginning is not None:
        heads[:, side.tasks_on(beginning)] = 0
        ranks = np.array([beginning]) if alone else np.flatnonzero(ranks_after(side, beginning))
    result = Heads(heads, idle)
    yield result
    for _ in range(1 if alone else _ROUNDS):
        look()
        _pass_on(heads, side, headroom)
        yield result
        _wait(heads, idle, ranks, side, headroom)
        yield result
    if not alone:
        _pass_on(heads, side, headroom)
        yield result


def ranks_after(side: Side, beginning: int) -> Flags:
    """bool[num_ranks]: the ranks all of whose tasks come after one of the rank `beginning`, and that rank itself."""
    after = side.after[side.tasks_on(beginning)].any(axis=0) | (side.counts == 0)
    ranks = np.array([bool(after[side.tasks_on(rank)].all()) for rank in range(side.num_ranks)])
    ranks[beginning] = True
    return ranks


@quick
def _pass_on(heads: Integers, side: Side, headroom: MemoryHeadroom) -> None:
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


@quick
def _wait(heads: Integers, idle: Integers, ranks: Integers, side: Side, headroom: MemoryHeadroom) -> None:
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
