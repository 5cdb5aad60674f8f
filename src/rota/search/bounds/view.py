"""A problem seen from one end of the step: what has to be over before an op can start.

Seen from the end, time runs backwards: what an op held is free before it and what it freed is held, inputs become
outputs, and the step ends come first. So every argument about beginnings is one about endings too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rota.costs import Cluster
from rota.placement import Placement
from rota.search.problem import NO_LIMIT, Integers, Problem, Rows

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class View:
    """Micro-batch k of task t is the k-th seen from this end.

    `after[t, u]`: u comes after t, directly or not. `release_us`: no op of the task starts before. A rank's ops may
    hold `room_bytes` (NO_LIMIT: any) and always hold a multiple of `grain_bytes`. `places` are each rank's tasks, each
    after those that come before it.
    """

    counts: Integers
    durations_us: Integers
    held_bytes: Integers
    peak_bytes: Integers
    inputs: Rows
    order: Integers
    after: Flags
    stream: Integers
    release_us: Integers
    room_bytes: Integers
    grain_bytes: Integers
    places: Rows

    def tasks_on(self, rank: int) -> Integers:
        return self.places.values[self.places.first[rank] : self.places.first[rank + 1]]

    @cached_property
    def needed_bytes(self) -> Integers:
        """For each task what has to be free when it starts."""
        return np.maximum(self.held_bytes, 0) + self.peak_bytes

    @cached_property
    def parents(self) -> Integers:
        """For each place its deepest ancestor on the rank, counted from the rank's first place; -1: none."""
        parents = np.full(len(self.places.values), -1, np.int64)
        for rank in range(len(self.places.first) - 1):
            first, end = self.places.first[rank], self.places.first[rank + 1]
            tasks = self.places.values[first:end]
            before = self.after[np.ix_(tasks, tasks)]
            depth = before.sum(axis=0)
            for i in np.flatnonzero(depth):
                parents[first + i] = max(np.flatnonzero(before[:, i]), key=lambda j: (depth[j], j))
        return parents

    @cached_property
    def work_us(self) -> Integers:
        """For each rank."""
        sums = np.concatenate([[0], np.cumsum((self.counts * self.durations_us)[self.places.values])])
        return np.diff(sums[self.places.first])


def views(problem: Problem, step_ends: bool = True, limits: bool = True) -> tuple[View, View]:
    """From the beginning, and from the end; with or without what follows the last gradients, and the memory limits."""
    tasks, after = len(problem.counts), _after(problem)
    order = np.array(problem.topological, np.int64)
    place_in_order = np.empty(tasks, np.int64)
    place_in_order[order] = np.arange(tasks)
    room, grain, total = _rooms(problem)
    if not limits:
        room[:] = NO_LIMIT
    stream = np.array(problem.placement.component_of, np.int64)
    shared = (problem.counts, problem.durations_us)
    forward = View(
        *shared,
        problem.held_bytes,
        problem.peak_bytes,
        problem.inputs,
        order,
        after,
        stream,
        np.zeros(tasks, np.int64),
        room,
        grain,
        _sorted(problem.tasks_on, place_in_order),
    )
    backward = View(
        *shared,
        -problem.held_bytes,
        problem.peak_bytes,
        problem.outputs,
        order[::-1].copy(),
        after.T.copy(),
        stream,
        _step_end_tails(problem, after) if step_ends else np.zeros(tasks, np.int64),
        np.where(room == NO_LIMIT, NO_LIMIT, room - total),
        grain,
        _sorted(problem.tasks_on, -place_in_order),
    )
    return forward, backward


def _after(problem: Problem) -> Flags:
    after = np.zeros((len(problem.counts),) * 2, np.bool_)
    outputs = problem.outputs
    for task in reversed(problem.topological):
        for target in outputs.values[outputs.first[task] : outputs.first[task + 1] : 2]:
            after[task] |= after[target]
            after[task, target] = True
    return after


def _rooms(problem: Problem) -> tuple[Integers, Integers, Integers]:
    """For each rank: its limit, the greatest common divisor of all that its ops hold, what is left in the end."""
    on, held = problem.tasks_on, problem.held_bytes
    rows = [on.values[a:b] for a, b in zip(on.first, on.first[1:], strict=False)]
    grain = np.array([max(int(np.gcd.reduce(held[row], initial=0)), 1) for row in rows], np.int64)
    total = np.array([int((held[row] * problem.counts[row]).sum()) for row in rows], np.int64)
    return problem.limits_bytes.copy(), grain, total


def _sorted(tasks_on: Rows, position: Integers) -> Rows:
    rows = [tasks_on.values[a:b] for a, b in zip(tasks_on.first, tasks_on.first[1:], strict=False)]
    return Rows(tasks_on.first, np.concatenate([row[np.argsort(position[row])] for row in rows]))


def _step_end_tails(problem: Problem, after: Flags) -> Integers:
    """What follows any op of each task: its stage's reduction and later ones, and its rank's optimizer steps.

    A rank reduces in the order in which the stages' last gradients are there, one stage after the other.
    """
    tails = np.zeros(len(problem.counts), np.int64)
    ends, on = problem.step_ends, problem.tasks_on
    gradients: dict[int, list[int]] = {}
    for i, task in enumerate(problem.placement.tasks):
        if task.kind.makes_weight_gradients:
            gradients.setdefault(task.stage, []).append(i)
    for rank in range(problem.placement.num_ranks):
        row = ends.values[ends.first[rank] : ends.first[rank + 1]].reshape(-1, 3)
        here = on.values[on.first[rank] : on.first[rank + 1]]
        tails[here] = np.maximum(tails[here], row[:, 2].sum())
        for gradient, reduce_us, _ in row[row[:, 0] >= 0]:
            own = gradients[problem.placement.tasks[gradient].stage]
            later = (row[:, 0] >= 0) & after[own][:, row[:, 0]].all(axis=0)
            tails[gradient] = max(tails[gradient], reduce_us + row[later, 1].sum() + row[:, 2].sum())
    return tails


def without_common_tasks(problem: Problem) -> tuple[Problem, int]:
    """The problem without the time in which all ranks work together, and without transfers; that time.

    While all ranks work together nothing else runs: cut these times out of any timeline, and what is left is a timeline
    in which such tasks take no time. Transfers and reductions go on meanwhile, so they take no time in it either.
    """
    placement = problem.placement
    busy = {rank for task in placement.tasks for rank in task.ranks}
    common = [len(task.ranks) == len(busy) > 1 for task in placement.tasks]
    together_us = int((problem.counts * problem.durations_us)[common].sum())
    if not together_us:
        return problem, 0
    tasks = (replace(task, duration_us=0) if c else task for task, c in zip(placement.tasks, common, strict=True))
    ends = (replace(end, reduce_us=0) for end in placement.step_ends)
    apart = Placement(
        tuple(tasks), placement.edges, Cluster(placement.cluster.limit_bytes), placement.static_bytes, tuple(ends)
    )
    return Problem(apart, problem.num_microbatches, problem.room_bytes), together_us
