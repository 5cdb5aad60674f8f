"""Micro-batches that differ or are chunks of samples, as a step in which each micro-batch has stages of its own.

    folded      stages 0 1, micro-batches 0 1 of other sizes        0F0 0F1 …
    unfolded    stages 0 1 of micro-batch 0, 2 3 of micro-batch 1   0F0 2F1 …        stage s of m is m * 2 + s

The unfolded step is a placement like any other, with one data stream per micro-batch and one micro-batch in each. So
all searches and bounds hold for it, and its plans are plans of the folded step: only names of ops and stages differ.

In which order the tasks take the micro-batches is open there. What is the same for two micro-batches of one class is
not: exchanging two that are in the wrong order makes nothing later and holds no more memory, so they go in turn. The
same holds for whole samples whose chunks are of the same classes: there, each task takes the samples' first chunks in
turn, their second ones, and so on. If the sequence is to be kept, all of them do.

Chunks of one sample go forward in order and backward in reverse: these precedences are part of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.core.tasks import Edge, Kind, Op, Transfer
from rota.search.problem import Problem


@dataclass(frozen=True)
class Unfolding:
    """A step whose micro-batches differ, and its unfolded form.

    Attributes:
        placement: It has the class of each micro-batch, or the sample that each one is a chunk of.
        keeps_sequence: Whether each task takes the micro-batches in their sequence; but backwards and weight gradients
            take chunks of a sample in reverse.
    """

    placement: Placement
    keeps_sequence: bool = False

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of the step."""
        assert self.placement.given_microbatches is not None
        return self.placement.given_microbatches

    @cached_property
    def _width(self) -> int:
        return 1 + max(self.placement.stages)

    @cached_property
    def _numbers(self) -> dict[tuple[int, int], int]:
        """(micro-batch, index of a task) -> index of its task in the unfolded placement."""
        placement = self.placement
        pairs = (
            (m, t)
            for m in range(self.num_microbatches)
            for t, component in enumerate(placement.component_of)
            if component == m % placement.num_components
        )
        return {pair: i for i, pair in enumerate(pairs)}

    @cached_property
    def problem(self) -> Problem:
        """The unfolded step."""
        folded, numbers = self.placement, self._numbers
        tasks = []
        for m, t in numbers:
            task = folded.for_microbatch(m).tasks[t]
            tasks.append(replace(task, stage=m * self._width + task.stage))
        edges = [
            Edge(numbers[m, edge.source], numbers[m, edge.target], folded.value(edge.num_bytes, m))
            for m in range(self.num_microbatches)
            for edge in folded.edges
            if (m, edge.source) in numbers
        ]
        ends = [
            replace(end, stage=copies[0] * self._width + end.stage)
            for end in folded.step_ends
            if (copies := self._copies(end.stage))
        ]
        placement = replace(
            folded, tasks=tuple(tasks), edges=tuple(edges), step_ends=tuple(ends), class_of=(), sample_of=()
        )
        return Problem(placement, self.num_microbatches, (), self._width, tuple(self._precedences()))

    def _copies(self, stage: int) -> range:
        return self.placement.microbatches(stage, self.num_microbatches)

    def _precedences(self) -> Iterator[tuple[int, int]]:
        """Of each task, its micro-batches that go in turn."""
        for t, task in enumerate(self.placement.tasks):
            batches, rows = self._copies(task.stage), list[Sequence[int]]()
            if self.keeps_sequence:
                rows = [batches if task.kind is Kind.F else self.placement.backward_sequence(batches)]
            else:
                rows = [*self._alike(batches)]
                if task.kind in (Kind.F, Kind.B, Kind.I):
                    samples = (chunks for chunks in self.placement.chunks if chunks[0] in batches)
                    rows += [chunks if task.kind is Kind.F else chunks[::-1] for chunks in samples]
            for row in rows:
                yield from pairwise(self._numbers[m, t] for m in row)

    def _alike(self, batches: Sequence[int]) -> Iterable[Sequence[int]]:
        """Micro-batches of one class, or chunks at one place in samples of the same classes."""
        class_in = self.placement.class_in
        key_of: dict[int, tuple[tuple[int, ...], int]] = {}
        for chunks in self.placement.chunks:
            classes = tuple(map(class_in, chunks))
            key_of.update((m, (classes, place)) for place, m in enumerate(chunks))
        rows: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for m in batches:
            rows.setdefault(key_of.get(m, ((class_in(m),), 0)), []).append(m)
        return rows.values()

    def unfold(self, plan: Plan) -> Plan:
        """The same plan of the unfolded step; transfers on shared links are served as the plan simulates them."""
        served: list[list[Transfer]] = []
        if plan.shared_transfers.first:
            transfers = dict(plan.shared_transfers.transfers())
            served = [[transfers[node] for node in nodes] for nodes in plan.served]

        def unfolded(op: Op) -> Op:
            return op._replace(stage=op.microbatch * self._width + op.stage)

        return _renamed(plan, served, self.problem.original, unfolded)

    def fold(self, plan: Plan) -> Plan:
        """The plan that a plan of the unfolded step stands for."""
        return _renamed(plan, plan.service_orders, self.placement, lambda op: op._replace(stage=op.stage % self._width))


def _renamed(
    plan: Plan, served: Iterable[Iterable[Transfer]], placement: Placement, rename: Callable[[Op], Op]
) -> Plan:
    """The plan on another placement, with its ops and those of the transfers in order of service renamed."""
    orders = tuple(tuple(map(rename, order)) for order in plan.orders)
    service_orders = tuple(
        tuple(transfer._replace(source=rename(transfer.source), target=rename(transfer.target)) for transfer in order)
        for order in served
    )
    return Plan(placement, plan.num_microbatches, orders, service_orders=service_orders)
