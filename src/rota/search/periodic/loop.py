"""A placement as a loop: the tasks of one micro-batch of each component, repeated every period."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rota.core.placement import Placement
from rota.core.tasks import scalar
from rota.search.lowering import Carried
from rota.search.problem import NO_LIMIT, Problem


@dataclass(frozen=True)
class Loop:
    """The tasks of one micro-batch of each component, and what they wait for; `reserved_bytes` as in `Problem`."""

    original: Placement
    reserved_bytes: tuple[int, ...] = ()

    @cached_property
    def problem(self) -> Problem:
        """The problem of one micro-batch per component."""
        return Problem(self.original, self.original.num_components, self.reserved_bytes)

    @property
    def placement(self) -> Placement:
        """The placement with shared links as ranks and their transfers as tasks, as in `Problem`."""
        return self.problem.placement

    @property
    def num_tasks(self) -> int:
        """Tasks of one micro-batch of each component."""
        return len(self.placement.tasks)

    @cached_property
    def durations_us(self) -> tuple[int, ...]:
        """The duration of each task, in µs."""
        return tuple(scalar(task.duration_us) for task in self.placement.tasks)

    @cached_property
    def tasks_on(self) -> tuple[tuple[int, ...], ...]:
        """The tasks of each rank."""
        return tuple(tuple(tasks.tolist()) for tasks in self.problem.tasks_on)

    @cached_property
    def limits_bytes(self) -> tuple[int | None, ...]:
        """What the ops of each rank may hold; None without a limit."""
        return tuple(None if limit == NO_LIMIT else int(limit) for limit in self.problem.limits_bytes)

    @cached_property
    def carried(self) -> tuple[tuple[Carried, ...], ...]:
        """Per rank, what transfers hold there; nothing where the rank has no limit."""
        carried = self.problem.lowered.carried
        return tuple(
            tuple(held for held in carried if limit is not None and rank == held.rank)
            for rank, limit in enumerate(self.limits_bytes)
        )

    def left_bytes(self, rank: int) -> int:
        """Bytes that each micro-batch leaves behind on a rank; more than 0 will exceed any limit in the end."""
        return sum(scalar(self.placement.tasks[i].held_bytes) for i in self.tasks_on[rank])

    # --- what waits for what ---------------------------------------------------------------------------------------

    @cached_property
    def _paths_us(self) -> list[list[int]]:
        """`Problem.paths_us` as whole numbers of Python, which CP-SAT takes."""
        return self.problem.paths_us.tolist()

    def apart_us(self, source: int, target: int) -> int | None:
        """How much later than `source` the task `target` starts at least; None if it does not depend on it."""
        least_us = self._paths_us[source][target]
        return least_us if least_us >= 0 else None

    @cached_property
    def waits(self) -> tuple[tuple[int, int, int], ...]:
        """(source, target, least µs from start to start) of each edge that is not implied by a longer path."""
        result = []
        for (source, target), lag in self.problem.lags_us.items():
            least = self.durations_us[source] + lag
            paths_us = self._paths_us[source]  # far below 0 where there is none
            inputs = self.problem.inputs[target].reshape(-1, 2).tolist()
            around_us = (paths_us[task] + self.durations_us[task] + us for task, us in inputs if task != source)
            if not any(us >= least for us in around_us):
                result.append((source, target, least))
        return tuple(result)

    @cached_property
    def bridges(self) -> frozenset[tuple[int, int]]:
        """Edges whose data wait less than a period in some best schedule, so a search may require this of all of them.

        Consider the tasks that depend on `target`, and assume that no other edge leads to them. If the data wait a
        period or more, all of these tasks can start a period earlier: offsets stay the same, and memory does not grow
        if the tasks free at least as much as they allocate. In the same way, all tasks that `source` depends on can
        start a period later. Each such move shortens the sum of the waits on all edges, so the moves end, and then the
        data of every bridge wait less than a period.
        """
        if not self.waits:
            return frozenset()
        reaches = self.problem.paths_us >= 0  # a task reaches itself
        sources, targets = (np.array(ends) for ends in list(zip(*self.waits, strict=True))[:2])
        num_into = (~reaches[:, sources] & reaches[:, targets]).sum(axis=1)  # per task: edges to it and what follows
        num_out = (reaches[sources] & ~reaches[targets]).sum(axis=0)  # per task: edges from it and what is before
        held = np.zeros((self.num_tasks, len(self.tasks_on)), np.int64)
        for rank, tasks in enumerate(self.problem.tasks_on):
            if self.limits_bytes[rank] is not None:
                held[tasks, rank] = self.problem.held_bytes[tasks]
        earlier = (num_into == 1) & (reaches @ held <= 0).all(axis=1)
        later = (num_out == 1) & (reaches.T @ held >= 0).all(axis=1)
        are_bridges = (earlier[targets] | later[sources]).tolist()
        return frozenset((a, b) for (a, b, _), is_bridge in zip(self.waits, are_bridges, strict=True) if is_bridge)

    @cached_property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """The connected components of the waits: the tasks of each, in topological order."""
        part = list(range(self.num_tasks))
        for source, target, _ in self.waits:
            old, new = part[target], part[source]
            part = [new if p == old else p for p in part]
        members: dict[int, list[int]] = {}
        for task in self.problem.topological:
            members.setdefault(part[task], []).append(task)
        return tuple(map(tuple, members.values()))

    @cached_property
    def critical_us(self) -> int:
        """Least time in which a micro-batch passes through all tasks."""
        return int((self.problem.heads_us + self.problem.durations_us).max())
