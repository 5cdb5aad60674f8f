"""A placement and a number of micro-batches as flat arrays, for compiled loops.

Micro-batches pass through a task in order: as all are alike, two of them in the wrong order can be exchanged without
making anything later or holding more. So a rank's order is a row of task indices: the k-th time that a task appears
there is the k-th micro-batch of its stream. All orders of a plan are one array, rank after rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from rota.placement import Placement
from rota.plan import Plan
from rota.tasks import Op

Integers = NDArray[np.int64]
Orders = NDArray[np.int32]  #: task indices; rank r's are those from `Problem.first_op[r]` to `first_op[r + 1]`

NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class Rows:
    """Rows of different lengths in one array: row i is `values[first[i] : first[i + 1]]`."""

    first: Integers
    values: Integers

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Rows:
        first = np.array([0, *accumulate(len(row) for row in rows)], dtype=np.int64)
        return cls(first, np.array([*chain.from_iterable(rows)], dtype=np.int64))


@dataclass(frozen=True)
class Problem:
    """`room_bytes[rank]` is kept free for what transfers hold, which no order alone tells."""

    placement: Placement
    num_microbatches: int
    room_bytes: tuple[int, ...] = ()

    @cached_property
    def counts(self) -> Integers:
        """For each task its micro-batches."""
        batches = (self.placement.microbatches(task.stage, self.num_microbatches) for task in self.placement.tasks)
        return np.array([len(range_) for range_ in batches], dtype=np.int64)

    @cached_property
    def first_node(self) -> Integers:
        """Task t's micro-batch k is node first_node[t] + k, as in `Plan`; one entry more, the number of ops."""
        return np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)

    @cached_property
    def durations_us(self) -> Integers:
        return np.array([task.duration_us for task in self.placement.tasks], dtype=np.int64)

    @cached_property
    def held_bytes(self) -> Integers:
        return np.array([task.held_bytes for task in self.placement.tasks], dtype=np.int64)

    @cached_property
    def peak_bytes(self) -> Integers:
        return np.array([task.peak_bytes for task in self.placement.tasks], dtype=np.int64)

    @cached_property
    def ranks(self) -> Rows:
        """For each task its ranks."""
        return Rows.of([task.ranks for task in self.placement.tasks])

    @cached_property
    def tasks_on(self) -> Rows:
        """For each rank its tasks."""
        tasks = self.placement.tasks
        return Rows.of([[i for i, t in enumerate(tasks) if r in t.ranks] for r in range(self.placement.num_ranks)])

    @cached_property
    def lags_us(self) -> dict[tuple[int, int], int]:
        """For each edge between tasks how long until the last rank has its data."""
        lags = {(edge.source, edge.target): 0 for edge in self.placement.edges}
        for route in self.placement.routes:
            lags[route.source, route.target] = max(lags[route.source, route.target], route.duration_us)
        return lags

    @cached_property
    def inputs(self) -> Rows:
        """For each task, source and lag in µs of each of its edges: s0 l0 s1 l1 …"""
        rows: list[list[int]] = [[] for _ in self.placement.tasks]
        for (source, target), lag in self.lags_us.items():
            rows[target] += [source, lag]
        return Rows.of(rows)

    @cached_property
    def outputs(self) -> Rows:
        """For each task, target and lag in µs of each of its edges: t0 l0 t1 l1 …"""
        rows: list[list[int]] = [[] for _ in self.placement.tasks]
        for (source, target), lag in self.lags_us.items():
            rows[source] += [target, lag]
        return Rows.of(rows)

    @cached_property
    def topological(self) -> tuple[int, ...]:
        """All tasks, each after those that it reads; of several, the lowest first."""
        waiting = Counter(target for _, target in self.lags_us)
        ready = [t for t in range(len(self.placement.tasks)) if not waiting[t]]
        result: list[int] = []
        while ready:
            task = min(ready)
            ready.remove(task)
            result.append(task)
            for source, target in self.lags_us:
                if source == task:
                    waiting[target] -= 1
                    if not waiting[target]:
                        ready.append(target)
        return tuple(result)

    @cached_property
    def limits_bytes(self) -> Integers:
        """What each rank's ops may hold, static bytes and room taken off; NO_LIMIT without a limit."""
        room = self.room_bytes or (0,) * self.placement.num_ranks
        rows = zip(self.placement.cluster.limit_bytes, self.placement.static_bytes, room, strict=True)
        return np.array([NO_LIMIT if limit is None else limit - static - r for limit, static, r in rows], np.int64)

    @cached_property
    def first_op(self) -> Integers:
        """Where in `Orders` each rank's ops begin; one entry more, the length."""
        on, counts = self.tasks_on, self.counts
        sizes = [counts[on.values[on.first[r] : on.first[r + 1]]].sum() for r in range(self.placement.num_ranks)]
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    @cached_property
    def step_ends(self) -> Rows:
        """For each rank, of each stage that ends there: gradient task (-1: none), reduction, optimizer step in µs."""
        rows: list[list[int]] = [[] for _ in range(self.placement.num_ranks)]
        for end in self.placement.step_ends:
            gradients = [
                i
                for (stage, kind), i in self.placement.index.items()
                if stage == end.stage and kind.makes_weight_gradients
            ]
            for rank in self.placement.gradient_ranks(end.stage):
                rows[rank] += [next(iter(gradients), -1), end.reduce_us, end.optimizer_us]
        return Rows.of(rows)

    @cached_property
    def gradients(self) -> Rows:
        """For each of `step_ends`, all tasks that make its weight gradients, on that rank or elsewhere."""
        tasks = enumerate(self.placement.tasks)
        of_stage: dict[int, list[int]] = {}
        for i, task in tasks:
            if task.kind.makes_weight_gradients:
                of_stage.setdefault(task.stage, []).append(i)
        ranks = range(self.placement.num_ranks)
        ends = self.placement.step_ends
        return Rows.of(
            [of_stage.get(e.stage, []) for r in ranks for e in ends if r in self.placement.gradient_ranks(e.stage)]
        )

    def to_orders(self, plan: Plan) -> Orders:
        """The plan's orders as one array. Its micro-batches are taken to be in order in each task."""
        index = self.placement.index
        tasks = (index[stage, kind] for order in plan.orders for stage, kind, _ in order)
        return np.fromiter(tasks, dtype=np.int32, count=int(self.first_op[-1]))

    def to_plan(self, orders: Orders) -> Plan:
        """The plan of these orders."""
        streams = self.placement.num_components
        ops = [
            [Op(task.stage, task.kind, m) for m in range(stream, self.num_microbatches, streams)]
            for task, stream in zip(self.placement.tasks, self.placement.component_of, strict=True)
        ]
        rows = []
        for rank in range(self.placement.num_ranks):
            following = [iter(row) for row in ops]
            rows.append(tuple(next(following[task]) for task in self._row(orders, rank)))
        return Plan(self.placement, self.num_microbatches, tuple(rows))

    def _row(self, orders: Orders, rank: int) -> list[int]:
        row: list[int] = orders[self.first_op[rank] : self.first_op[rank + 1]].tolist()
        return row


def with_more_room(problem: Problem, room_bytes: Integers) -> Problem:
    """The same with `room_bytes` more on each rank."""
    room = room_bytes + np.array(problem.room_bytes or 0, np.int64)
    return replace(problem, room_bytes=tuple(room.tolist()))
