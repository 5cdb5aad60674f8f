"""A placement and a number of micro-batches as flat arrays, for compiled loops.

Micro-batches pass through a task in order: all are alike, so exchanging two that are in the wrong order makes nothing
later and holds no more memory. A rank's order is therefore a row of task indices: the k-th time that a task appears
there is the k-th micro-batch of its component. All orders of a plan are one array, rank after rank.

Words of this room: a *task* is an index into `Placement.tasks`; a *node* is one op, task t's k-th micro-batch, with the
number `first_node[t] + k`; a *component* is a part of the placement that no edge joins to the rest (a data stream).
Where the cluster has shared links, these are ranks, and the transfers that they serve are tasks; see `lowering`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from itertools import accumulate, chain, repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.core.tasks import Op, Transfer
from rota.search.lowering import Lowered, lower

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
#: int32[num_ops], tasks; those of rank r are from `Problem.first_op[r]` to `first_op[r + 1]`.
Orders = NDArray[np.int32]

NO_LIMIT = 1 << 60  #: stands for "no limit" in arrays of bytes
_NO_PATH = -(1 << 60)


@dataclass(frozen=True)
class Rows:
    """Rows of different lengths in one array: row i is `values[first[i] : first[i + 1]]`."""

    first: Integers  #: int64[num_rows + 1]
    values: Integers  #: int64[total length of all rows]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Rows:
        """The rows as int64 arrays."""
        first = np.array([0, *accumulate(len(row) for row in rows)], dtype=np.int64)
        return cls(first, np.array([*chain.from_iterable(rows)], dtype=np.int64))

    def __getitem__(self, row: int) -> Integers:
        return self.values[self.first[row] : self.first[row + 1]]

    def __len__(self) -> int:
        return len(self.first) - 1

    def __iter__(self) -> Iterator[Integers]:
        return (self[row] for row in range(len(self)))


class StepEnds(NamedTuple):
    """The reductions and optimizer steps of all ranks; those of rank r are `first[r]` to `first[r + 1]`.

    The weight gradients that step end e waits for come from the tasks `gradients[first_gradient[e] :
    first_gradient[e + 1]]`, on that rank or elsewhere.
    """

    first: Integers  #: int64[num_ranks + 1]
    reduce_us: Integers  #: int64[num_step_ends]
    optimizer_us: Integers  #: int64[num_step_ends]
    first_gradient: Integers  #: int64[num_step_ends + 1]
    gradients: Integers  #: int64[...], tasks

    def of_rank(self, rank: int) -> range:
        """Indices of the rank's step ends."""
        return range(int(self.first[rank]), int(self.first[rank + 1]))

    def optimizers_us(self, rank: int) -> int:
        """Duration of all of the rank's optimizer steps."""
        return int(self.optimizer_us[self.first[rank] : self.first[rank + 1]].sum())

    def gradients_of(self, end: int) -> Integers:
        """int64[...]: the tasks that make the gradients of one step end."""
        return self.gradients[self.first_gradient[end] : self.first_gradient[end + 1]]


@dataclass(frozen=True)
class Problem:
    """What to schedule: `num_microbatches` through the placement `original`, whose micro-batches are alike.

    `reserved_bytes[rank]` of the limit are set apart for what transfers hold, which depends on times, not on orders.
    Where each micro-batch has stages of its own (see `unfolding`), these are `stages_per_microbatch` many, and
    `precedences` are pairs of tasks of which the first has to end before the second starts.
    """

    original: Placement
    num_microbatches: int
    reserved_bytes: tuple[int, ...] = ()
    stages_per_microbatch: int = 0
    precedences: tuple[tuple[int, int], ...] = ()

    @cached_property
    def lowered(self) -> Lowered:
        """The placement with shared links as ranks and their transfers as tasks."""
        return lower(self.original)

    @property
    def placement(self) -> Placement:
        """The placement with shared links as ranks, after the others, and their transfers as tasks, after the ops."""
        return self.lowered.placement

    @property
    def num_ranks(self) -> int:
        """Number of ranks; in `placement`, shared links come after them."""
        return self.original.num_ranks

    @cached_property
    def counts(self) -> Integers:
        """int64[num_tasks]: number of micro-batches per task."""
        placement, num_microbatches = self.placement, self.num_microbatches
        counts = (len(placement.microbatches(task.stage, num_microbatches)) for task in placement.tasks)
        return np.fromiter(counts, np.int64)

    @cached_property
    def first_node(self) -> Integers:
        """int64[num_tasks + 1]: micro-batch k of task t is node first_node[t] + k, as in `Plan`; last, num_ops."""
        return np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)

    @cached_property
    def durations_us(self) -> Integers:
        """int64[num_tasks]."""
        return np.array([task.duration_us for task in self.placement.tasks], dtype=np.int64)

    @cached_property
    def held_bytes(self) -> Integers:
        """int64[num_tasks]."""
        return np.array([task.held_bytes for task in self.placement.tasks], dtype=np.int64)

    @cached_property
    def peak_bytes(self) -> Integers:
        """int64[num_tasks]."""
        return np.array([task.peak_bytes for task in self.placement.tasks], dtype=np.int64)

    @cached_property
    def ranks(self) -> Rows:
        """One row per task: its ranks."""
        return Rows.of([task.ranks for task in self.placement.tasks])

    @cached_property
    def tasks_on(self) -> Rows:
        """One row per rank: its tasks."""
        tasks = self.placement.tasks
        return Rows.of([[i for i, t in enumerate(tasks) if r in t.ranks] for r in range(self.placement.num_ranks)])

    @cached_property
    def lags_us(self) -> dict[tuple[int, int], int]:
        """(source, target) -> µs from the end of the source until the last rank of the target has its data."""
        return dict.fromkeys(self.precedences, 0) | self.lowered.lags_us

    @cached_property
    def component_of(self) -> Integers:
        """int64[num_tasks]: the component of each task; one for all that edges or precedences join."""
        components = np.array(self.placement.component_of, np.int64)
        for before, task in self.precedences:
            components[components == components[task]] = components[before]
        return components

    @cached_property
    def inputs(self) -> Rows:
        """One row per task: s0 l0 s1 l1 …, the source and lag in µs of each edge into it."""
        rows: list[list[int]] = [[] for _ in self.placement.tasks]
        for (source, target), lag in self.lags_us.items():
            rows[target] += [source, lag]
        return Rows.of(rows)

    @cached_property
    def outputs(self) -> Rows:
        """One row per task: t0 l0 t1 l1 …, the target and lag in µs of each edge out of it."""
        rows: list[list[int]] = [[] for _ in self.placement.tasks]
        for (source, target), lag in self.lags_us.items():
            rows[source] += [target, lag]
        return Rows.of(rows)

    @cached_property
    def topological(self) -> tuple[int, ...]:
        """All tasks, each after those that it reads; of several that could come next, the lowest first."""
        sources: dict[int, list[int]] = {task: [] for task in range(len(self.placement.tasks))}
        for source, target in self.lags_us:
            sources[target].append(source)
        sorter = TopologicalSorter(sources)
        sorter.prepare()
        ready: list[int] = []
        result: list[int] = []
        while sorter.is_active():
            for task in sorter.get_ready():
                heappush(ready, task)
            result.append(heappop(ready))
            sorter.done(result[-1])
        return tuple(result)

    @cached_property
    def task_of(self) -> Integers:
        """int64[num_ops]: the task of each node."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @cached_property
    def paths_us(self) -> Integers:
        """int64[num_tasks, num_tasks]: the longest paths through one micro-batch.

        `paths_us[t, u]` is the least µs from the start of task t to the start of task u: 0 where u is t, less than 0
        where u does not depend on t.
        """
        into = np.full((len(self.counts),) * 2, _NO_PATH, np.int64)  # [target, source]: rows are contiguous
        for task in self.topological:
            into[task, task] = 0
            for source, lag in self.inputs[task].reshape(-1, 2):
                np.maximum(into[task], into[source] + self.durations_us[source] + lag, out=into[task])
        return np.ascontiguousarray(into.T)

    @cached_property
    def after(self) -> Flags:
        """bool[num_tasks, num_tasks]: `after[t, u]` is set where task u depends on task t, directly or not."""
        after: Flags = self.paths_us >= 0
        np.fill_diagonal(after, False)
        return after

    @cached_property
    def heads_us(self) -> Integers:
        """int64[num_tasks]: least µs from the start of its micro-batch to the start of each task."""
        return self.paths_us.max(axis=0)

    @cached_property
    def tails_us(self) -> Integers:
        """int64[num_tasks]: least µs from the end of each task to the end of its micro-batch."""
        return (self.paths_us + self.durations_us).max(axis=1) - self.durations_us

    @cached_property
    def limits_bytes(self) -> Integers:
        """int64[num_ranks]: what a rank's ops may hold: its limit less static and reserved bytes, or NO_LIMIT."""
        reserved = self.reserved_bytes or (0,) * self.placement.num_ranks
        rows = zip(self.placement.cluster.limit_bytes, self.placement.static_bytes, reserved, strict=True)
        return np.array([NO_LIMIT if limit is None else limit - static - r for limit, static, r in rows], np.int64)

    @cached_property
    def first_op(self) -> Integers:
        """int64[num_ranks + 1]: where in `Orders` each rank's ops begin; the last entry is the length."""
        sizes = [self.counts[tasks].sum() for tasks in self.tasks_on]
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    @cached_property
    def step_ends(self) -> StepEnds:
        """What each rank does after its ops, stage by stage."""
        gradients: dict[int, list[int]] = {}
        for i, task in enumerate(self.placement.tasks):
            if task.kind.makes_weight_gradients:
                gradients.setdefault(self._stage_in_step(task.stage), []).append(i)
        ranks_of = {end.stage: self.placement.gradient_ranks(end.stage) for end in self.placement.step_ends}
        rows = [
            [end for end in self.placement.step_ends if rank in ranks_of[end.stage]]
            for rank in range(self.placement.num_ranks)
        ]
        first = np.array([0, *accumulate(map(len, rows))], np.int64)
        ends = [*chain.from_iterable(rows)]
        reduce_us = np.array([end.reduce_us for end in ends], np.int64)
        optimizer_us = np.array([end.optimizer_us for end in ends], np.int64)
        tasks = Rows.of([gradients.get(self._stage_in_step(end.stage), []) for end in ends])
        return StepEnds(first, reduce_us, optimizer_us, tasks.first, tasks.values)

    def _stage_in_step(self, stage: int) -> int:
        """The stage that a stage of one micro-batch is a copy of."""
        return stage % self.stages_per_microbatch if self.stages_per_microbatch else stage

    def to_orders(self, plan: Plan) -> Orders:
        """The plan's orders as one array, int32[num_ops]. Assumes that each task does its micro-batches in order.

        Raises PlanError where transfers are served as they come and the plan waits in a cycle.
        """
        index = self.placement.index
        tasks = (index[stage, kind] for order in plan.orders for stage, kind, _ in order)
        orders = np.fromiter(tasks, dtype=np.int32, count=int(self.first_op[self.num_ranks]))
        if not self.original.cluster.shared:
            return orders
        num_step_ends = 2 * len(plan.step_end_ranks)  # which come before the services in the plan's graph
        served = [self.task_of[np.array(nodes, np.int64) - num_step_ends] for nodes in plan.served]
        return np.concatenate([orders, *served]).astype(np.int32)

    def to_plan(self, orders: Orders) -> Plan:
        """The plan of these orders."""
        num_components, make = self.placement.num_components, partial(tuple.__new__, Op)
        # Numbers that many ops share are made once.
        microbatches = [[*range(first, self.num_microbatches, num_components)] for first in range(num_components)]
        with _uncollected():
            ops: list[Op] = []  # by node
            for task, component in zip(self.original.tasks, self.placement.component_of, strict=False):
                ops.extend(map(make, zip(repeat(task.stage), repeat(task.kind), microbatches[component])))
            rows = [tuple(map(ops.__getitem__, self._nodes(orders, rank))) for rank in range(self.num_ranks)]
        plan = Plan(self.original, self.num_microbatches, tuple(rows))
        return replace(plan, service_orders=self._served(plan, orders)) if self.original.cluster.shared else plan

    def _served(self, plan: Plan, orders: Orders) -> tuple[tuple[Transfer, ...], ...]:
        """For each shared link its transfers, in these orders."""
        first = len(self.original.tasks)
        transfers = {
            first + i: [plan.placement.transfer(route, m) for m in plan.microbatches_on(route)]
            for i, route in enumerate(self.lowered.services)
        }
        rows = []
        for link in range(self.num_ranks, self.placement.num_ranks):
            following = {task: iter(row) for task, row in transfers.items()}
            rows.append(tuple(next(following[task]) for task in self._row(orders, link).tolist()))
        return tuple(rows)

    def rank_name(self, rank: int) -> str:
        """What a rank of `placement` is, for messages."""
        if rank < self.num_ranks:
            return f"rank {rank}"
        return f"the shared link {self.original.cluster.shared[rank - self.num_ranks].name}"

    def node_name(self, task: int, k: int) -> str:
        """A task's k-th op, or a transfer, for messages."""
        if task < len(self.original.tasks):
            stage, kind = self.original.tasks[task].stage, self.original.tasks[task].kind
            microbatch = self.original.microbatches(stage, self.num_microbatches)[k]
            return str(Op(self._stage_in_step(stage), kind, microbatch))
        route = self.original.routes[self.lowered.services[task - len(self.original.tasks)]]
        return f"{self.node_name(route.source, k)}→{self.node_name(route.target, k)}"

    def _nodes(self, orders: Orders, rank: int) -> list[int]:
        """The nodes of the rank's row."""
        row = self._row(orders, rank)
        by_task = np.argsort(row, kind="stable")
        tasks = row[by_task]
        nodes = np.empty(len(row), np.int64)
        nodes[by_task] = self.first_node[tasks] + np.arange(len(row)) - np.searchsorted(tasks, tasks)
        return nodes.tolist()

    def _row(self, orders: Orders, rank: int) -> Orders:
        return orders[self.first_op[rank] : self.first_op[rank + 1]]


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage is collected in the block, which makes so many tuples that this would cost several times as much."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def reserving(problem: Problem, more_bytes: Integers) -> Problem:
    """The same problem with `more_bytes` (int64[num_ranks]) more set apart for transfers on each rank."""
    reserved = more_bytes + np.array(problem.reserved_bytes or 0, np.int64)
    return replace(problem, reserved_bytes=tuple(reserved.tolist()))


def without_common_tasks(problem: Problem) -> tuple[Problem, int]:
    """The problem without the time in which all ranks work together, and without transfers; then that time in µs.

    Nothing else runs while all ranks work together. Cut these times out of any timeline, and what is left is a timeline
    in which such tasks take no time. Transfers and reductions go on meanwhile, so they take no time in it either; nor
    does what messages cost other ops.
    """
    placement = problem.original
    busy = {rank for task in placement.tasks for rank in task.ranks}
    common = [i for i, task in enumerate(placement.tasks) if len(task.ranks) == len(busy) > 1]
    together_us = int((problem.counts * problem.durations_us)[common].sum())
    if not together_us:
        return problem, 0
    tasks = [*placement.tasks]
    for i in common:
        tasks[i] = replace(tasks[i], duration_us=0)
    ends = (replace(end, reduce_us=0) for end in placement.step_ends)
    cluster = placement.cluster.with_free_transfers()
    apart = replace(placement, tasks=tuple(tasks), cluster=cluster, step_ends=tuple(ends))
    reserved = problem.reserved_bytes[: problem.num_ranks]
    return replace(problem, original=apart, reserved_bytes=reserved), together_us
