"""From a model of sizes to the figures of every task, for all micro-batches of a step at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import TopologicalSorter
from heapq import heappop, heappush

import numpy as np

from rota.batching.problem import NO_LIMIT, BatchProblem, Floats, Integers
from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.errors import SearchError
from rota.core.placement import Placement, with_amounts
from rota.core.sizes import CURVES, Curve, Size, SizeModel
from rota.core.tasks import Kind, StepEnd, Task, amount_of

Place = Callable[[Costs, Cluster], Placement]

_FORM_LENGTH = 3  # constant, tokens, squares


@dataclass(frozen=True)
class Layout:
    """A model of sizes on ranks. Tasks and edges are those of `placement`, the placement of a micro-batch of one token.

    Attributes:
        model: The model of sizes.
        placement: Its stages on ranks.
        sorted_tasks: Indices into the placement's tasks in topological order, as a `BatchProblem` has them.
    """

    model: SizeModel
    placement: Placement
    sorted_tasks: tuple[int, ...]

    @classmethod
    def of(cls, model: SizeModel, cluster: Cluster, place: Place) -> Layout:
        """The layout that `place` makes. Raises SearchError for one that batches cannot be planned for yet."""
        placement = place(model.costs(Size(1, 1)), cluster)
        if placement.num_components > 1:
            raise SearchError(
                f"the placement has {placement.num_components} data streams; batches are planned for one: "
                f"use rota.place"
            )
        if wide := [task for task in placement.tasks if len(task.ranks) > 1]:
            raise SearchError(f"task {wide[0]} is on {len(wide[0].ranks)} ranks; batches are planned with one per task")
        if cluster.shared:
            raise SearchError(
                "the cluster has shared links, which plans of batches do not count: give it with shared=()"
            )
        return cls(model, placement, _topological(placement))

    def problem(self, sizes: Sequence[Size]) -> BatchProblem:
        """The step of micro-batches of these sizes."""
        values = self._values_of(sizes)
        placement, tasks = self.placement, [self.placement.tasks[i] for i in self.sorted_tasks]
        position = {task: i for i, task in enumerate(self.sorted_tasks)}
        sources, targets = [e.source for e in placement.edges], [e.target for e in placement.edges]
        edge_bytes, lags = self._edges(values, len(sizes))
        edges = np.array([[position[a], position[b]] for a, b in zip(sources, targets, strict=True)], np.int64)
        limits = zip(placement.cluster.limit_bytes, placement.static_bytes, strict=True)
        return BatchProblem(
            durations_us=_columns([values[_DURATION[task.kind]][:, self._stage_of(task)] for task in tasks]),
            held_bytes=_columns([self._held(values, task) for task in tasks]),
            peak_bytes=_columns([values[_PEAK[task.kind]][:, self._stage_of(task)] for task in tasks]),
            lags_us=lags,
            edge_bytes=edge_bytes,
            edges=edges.reshape(-1, 2),
            rank_of=np.array([task.ranks[0] for task in tasks], np.int64),
            choice_of=np.array([1 if t.kind is Kind.F else 2 if t.kind is Kind.W else 0 for t in tasks], np.int64),
            limits_bytes=np.array([NO_LIMIT if limit is None else limit - static for limit, static in limits]),
            tails_us=self._tails(),
        )

    def placed(self, problem: BatchProblem, sizes: Sequence[Size], sequence: Integers) -> Placement:
        """The placement of micro-batches in this sequence, one class per size; `problem` and `sizes` have their own."""
        in_order = [sizes[m] for m in sequence.tolist()]
        first = {size: int(m) for size, m in zip(reversed(in_order), reversed(sequence.tolist()), strict=True)}
        class_of = {size: c for c, size in enumerate(first)}
        rows = np.array([*first.values()])
        columns = [a[rows].T.tolist() for a in (problem.durations_us, problem.held_bytes, problem.peak_bytes)]
        tasks = list(self.placement.tasks)
        for task, *figures in zip(self.sorted_tasks, *columns, strict=True):
            tasks[task] = with_amounts(self.placement.tasks[task], map(amount_of, figures))
        edge_columns = problem.edge_bytes[rows].T.tolist()
        edges = [
            edge._replace(num_bytes=amount_of(column))
            for edge, column in zip(self.placement.edges, edge_columns, strict=True)
        ]
        classes = tuple(class_of[size] for size in in_order) if len(rows) > 1 else ()
        return replace(self.placement, tasks=tuple(tasks), edges=tuple(edges), class_of=classes)

    def work(self) -> Floats:
        """float64[num_forms, 3]: ranks' times for a micro-batch, as forms of (1, tokens, squares)."""
        forms = np.zeros((self.placement.num_ranks, _FORM_LENGTH))
        for task in self.placement.tasks:
            forms[task.ranks[0]] += self._form(_DURATION[task.kind], task.stage)
        return undominated(forms)

    def needs(self, rank: int) -> Floats:
        """float64[num_forms, 3]: bytes that a rank needs for one micro-batch alone; the largest counts."""
        forms, level = [np.zeros(_FORM_LENGTH)], np.zeros(_FORM_LENGTH)
        for i in self.sorted_tasks:
            task = self.placement.tasks[i]
            if task.ranks[0] != rank:
                continue
            held = self._held_form(task)
            received, sent = np.zeros(_FORM_LENGTH), np.zeros(_FORM_LENGTH)
            for e, edge in enumerate(self.placement.edges):
                if self._is_transfer(e):
                    received += self._edge_form(e) if edge.target == i else 0
                    sent += self._edge_form(e) if edge.source == i and any(self._link(e)) else 0
            forms.append(level + np.maximum(held, 0) + self._form(_PEAK[task.kind], task.stage) + received)
            level = level + held
            forms.append(level + sent)
        return undominated(np.array(forms))

    # --- the fields of Costs behind each task and edge ---------------------------------------------------------------

    def _values_of(self, sizes: Sequence[Size]) -> dict[str, Integers]:
        """Each curve of the model at each size: int64[num_microbatches, num_stages or num_edges]."""
        tokens = np.array([[size.tokens] for size in sizes], np.float64)
        squares = np.array([[size.squares] for size in sizes], np.float64)
        values = {}
        for name in CURVES:
            curves = getattr(self.model, name)
            if curves is None:
                continue
            constant, per_token, per_square = np.array(curves, np.float64).reshape(-1, _FORM_LENGTH).T
            exact = constant + per_token * tokens + per_square * squares
            whole = np.maximum(np.floor(exact + 0.5), 0) if name.endswith("_us") else np.ceil(exact)
            values[name] = whole.astype(np.int64)
        held = values["activation_bytes"]
        values["input_frees_bytes"] = np.minimum(values.get("input_frees_bytes", held // 2), held)
        values.setdefault("gradient_bytes", values["boundary_bytes"])
        return values

    def _stage_of(self, task: Task) -> int:
        """The stage in the model: copies of a stage have its figures."""
        return task.stage % self.model.num_stages

    def _held(self, values: dict[str, Integers], task: Task) -> Integers:
        stage = self._stage_of(task)
        held, freed = values["activation_bytes"][:, stage], values["input_frees_bytes"][:, stage]
        return {Kind.F: held, Kind.B: -held, Kind.I: -freed, Kind.W: freed - held}[task.kind]

    def _held_form(self, task: Task) -> Floats:
        held = self._form("activation_bytes", task.stage)
        freed = self._form("input_frees_bytes", task.stage) if self.model.input_frees_bytes else held / 2
        return {Kind.F: held, Kind.B: -held, Kind.I: -freed, Kind.W: freed - held}[task.kind]

    def _form(self, name: str, stage: int) -> Floats:
        curves: Sequence[Curve] = getattr(self.model, name)
        return np.array(curves[stage % self.model.num_stages])

    def _edges(self, values: dict[str, Integers], count: int) -> tuple[Integers, Integers]:
        """(bytes, lags) of the edges: int64[num_microbatches, num_edges] each."""
        num_bytes = np.zeros((count, len(self.placement.edges)), np.int64)
        lags = np.zeros_like(num_bytes)
        for e in self._between:
            name, column = self._edge_source(e)
            num_bytes[:, e] = values[name][:, column]
            if self._is_transfer(e):
                latency_us, rate = self._link(e)
                lags[:, e] = latency_us + (-(-num_bytes[:, e] // rate) if rate else 0)
        return num_bytes, lags

    def _is_transfer(self, e: int) -> bool:
        edge, tasks = self.placement.edges[e], self.placement.tasks
        return tasks[edge.source].ranks != tasks[edge.target].ranks

    def _link(self, e: int) -> tuple[int, int]:
        """Latency in µs and bytes per µs, 0 for any number, of an edge between two ranks."""
        edge, tasks = self.placement.edges[e], self.placement.tasks
        link = self.placement.cluster.link_between(tasks[edge.source].ranks[0], tasks[edge.target].ranks[0])
        return link.latency_us, link.bytes_per_us or 0

    def _edge_source(self, e: int) -> tuple[str, int]:
        """The field with an edge's bytes, and its entry. `rota.place` lists forward edges first, then their mirrors."""
        num_edges, nth, half = len(self.model.boundary_bytes), self._between.index(e), len(self._between) // 2
        return ("boundary_bytes", nth % num_edges) if nth < half else ("gradient_bytes", (nth - half) % num_edges)

    @cached_property
    def _between(self) -> list[int]:
        """The edges between different stages."""
        tasks = self.placement.tasks
        return [
            e for e, edge in enumerate(self.placement.edges) if tasks[edge.source].stage != tasks[edge.target].stage
        ]

    def _edge_form(self, e: int) -> Floats:
        name, column = self._edge_source(e)
        return np.array((getattr(self.model, name) or self.model.boundary_bytes)[column])

    def _tails(self) -> Integers:
        """What comes at least after a rank's last op: the reduction of its stage, and all optimizer steps."""
        reductions_us = [min((end.reduce_us for end in ends), default=0) for ends in self._step_ends]
        optimizers_us = [sum(end.optimizer_us for end in ends) for ends in self._step_ends]
        return np.array(reductions_us, np.int64) + np.array(optimizers_us, np.int64)

    @property
    def has_exact_tails(self) -> bool:
        """Whether no rank has reductions of several stages, which may wait for each other."""
        return all(len(ends) < 2 or not any(end.reduce_us for end in ends) for ends in self._step_ends)

    @cached_property
    def _step_ends(self) -> list[list[StepEnd]]:
        ends = [(end, self.placement.gradient_ranks(end.stage)) for end in self.placement.step_ends]
        return [[end for end, ranks in ends if rank in ranks] for rank in range(self.placement.num_ranks)]


_DURATION = {Kind.F: "forward_us", Kind.B: "backward_us", Kind.I: "backward_us", Kind.W: "weight_us"}
_PEAK = {
    Kind.F: "forward_peak_bytes",
    Kind.B: "backward_peak_bytes",
    Kind.I: "backward_peak_bytes",
    Kind.W: "weight_peak_bytes",
}


def _topological(placement: Placement) -> tuple[int, ...]:
    """The tasks, each after its inputs, and a W as soon as it can be."""
    inputs: dict[int, list[int]] = {task: [] for task in range(len(placement.tasks))}
    for edge in placement.edges:
        inputs[edge.target].append(edge.source)
    sorter = TopologicalSorter(inputs)
    sorter.prepare()
    order: list[int] = []
    heap: list[tuple[bool, int]] = []
    while sorter.is_active():
        for task in sorter.get_ready():
            heappush(heap, (placement.tasks[task].kind is not Kind.W, task))
        order.append(heappop(heap)[1])
        sorter.done(order[-1])
    return tuple(order)


def _columns(columns: Sequence[Integers]) -> Integers:
    return np.ascontiguousarray(np.stack(columns, axis=1))


def undominated(forms: Floats) -> Floats:
    """The rows that are not below another one in every entry."""
    distinct = np.unique(forms, axis=0)
    return distinct[[(row <= distinct).all(axis=1).sum() == 1 for row in distinct]]
