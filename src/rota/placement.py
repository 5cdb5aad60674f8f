"""A placement: the tasks of one micro-batch, the edges between them, and the ranks that run them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from rota import reading
from rota.costs import Cluster, whole, whole_rows
from rota.errors import PlacementError
from rota.taskgraph import CycleError, TaskGraph
from rota.tasks import Kind, Task


class Edge(NamedTuple):
    """The task with index `target` reads `num_bytes` of the output of the task with index `source`."""

    source: int
    target: int
    num_bytes: int = 0


class Route(NamedTuple):
    """The transfer of an edge to one of its target's ranks: from rank `sender` to rank `receiver`.

    It takes `duration_us` if it never waits. For the first `service_us` of these it occupies the shared links with the
    indices `shared` in the cluster, all of them at once.
    """

    source: int
    target: int
    sender: int
    receiver: int
    num_bytes: int
    duration_us: int
    service_us: int = 0
    shared: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepEnd:
    """What follows a stage's last gradient, on each of its ranks.

    Attributes:
        stage: The stage.
        reduce_us: Duration of the reduction of gradients over replicas.
        optimizer_us: Duration of the optimizer step, which comes after it.
    """

    stage: int
    reduce_us: int
    optimizer_us: int

    def __post_init__(self) -> None:
        for name in ("reduce_us", "optimizer_us"):
            object.__setattr__(self, name, whole(f"{name} of stage {self.stage}", getattr(self, name)))


@dataclass(frozen=True)
class Placement:
    """Tasks on ranks, and edges between tasks, which form a DAG.

    Each disconnected component is a data stream: of C components, sorted by their lowest stage, component c runs the
    micro-batches c, c + C, c + 2C, …

    Attributes:
        tasks: The tasks; at most one per (stage, kind).
        edges: Edges between tasks, as indexes into `tasks`.
        cluster: The ranks and links.
        static_bytes: Bytes that each rank always holds; default 0.
        step_ends: Reductions and optimizer steps; at most one entry per stage.
        microbatch_rows: Examples in the micro-batch whose costs these are. None: unknown.

    Raises:
        PlacementError: A task or an edge is invalid, or the edges form a cycle.
    """

    tasks: tuple[Task, ...]
    edges: tuple[Edge, ...]
    cluster: Cluster
    static_bytes: tuple[int, ...] = ()
    step_ends: tuple[StepEnd, ...] = ()
    microbatch_rows: int | None = None

    def __post_init__(self) -> None:
        if not self.static_bytes:
            object.__setattr__(self, "static_bytes", (0,) * self.num_ranks)
        if len(self.static_bytes) != self.num_ranks:
            raise PlacementError(f"static_bytes has {len(self.static_bytes)} entries for {self.num_ranks} ranks")
        if self.microbatch_rows is not None:
            object.__setattr__(self, "microbatch_rows", whole_rows(self.microbatch_rows))
        if not self.tasks:
            raise PlacementError("a placement needs at least one task")
        for task in self.tasks:
            if max(task.ranks) >= self.num_ranks:
                raise PlacementError(
                    f"task {task} is on rank {max(task.ranks)}, but the cluster has {self.num_ranks} ranks "
                    f"(0 to {self.num_ranks - 1}); give the cluster more ranks or place the stage elsewhere"
                )
        if len(self.index) != len(self.tasks):
            twice, _ = Counter(map(str, self.tasks)).most_common(1)[0]
            raise PlacementError(f"task {twice} appears twice; a stage has at most one task of each kind")
        edges = []
        for edge in self.edges:
            if not (0 <= edge.source < len(self.tasks) and 0 <= edge.target < len(self.tasks)):
                raise PlacementError(f"{edge} points outside the {len(self.tasks)} tasks")
            name = f"num_bytes of the edge {self.tasks[edge.source]} -> {self.tasks[edge.target]}"
            edges.append(edge._replace(num_bytes=whole(name, edge.num_bytes)))
        object.__setattr__(self, "edges", tuple(edges))
        ending = [end.stage for end in self.step_ends]
        if unknown := [stage for stage in ending if stage not in self._tasks_of]:
            raise PlacementError(f"step_ends names stage {unknown[0]}, which has no task")
        if len({*ending}) < len(ending):
            often, _ = Counter(ending).most_common(1)[0]
            raise PlacementError(f"step_ends names stage {often} twice; a stage ends once, so remove one of them")
        self._refuse_cycles()

    def _refuse_cycles(self) -> None:
        inputs: list[list[tuple[int, int]]] = [[] for _ in self.tasks]
        for edge in self.edges:
            inputs[edge.target].append((edge.source, 0))
        try:
            TaskGraph([0] * len(self.tasks), inputs).earliest()
        except CycleError as error:
            names = [str(self.tasks[node]) for node in reversed(error.nodes)]
            raise PlacementError(f"the edges form a cycle: {' -> '.join([*names, names[0]])}") from None

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.cluster.num_ranks

    @cached_property
    def index(self) -> Mapping[tuple[int, Kind], int]:
        """(stage, kind) -> index into `tasks`."""
        return {(task.stage, task.kind): i for i, task in enumerate(self.tasks)}

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """The stages that have a task, in ascending order."""
        return tuple(sorted({task.stage for task in self.tasks}))

    @property
    def num_stages(self) -> int:
        """Number of stages, copies included."""
        return len(self.stages)

    def task(self, stage: int, kind: Kind) -> Task | None:
        """The task of a stage, or None if the stage has no task of this kind."""
        i = self.index.get((stage, kind))
        return None if i is None else self.tasks[i]

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """The stages on `rank`, in ascending order."""
        return tuple(sorted({task.stage for task in self.tasks if rank in task.ranks}))

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """The ranks of a stage's first task."""
        return next(task.ranks for task in self.tasks if task.stage == stage)

    def gradient_ranks(self, stage: int) -> tuple[int, ...]:
        """The ranks that make a stage's weight gradients; if it has none, its ranks."""
        tasks = (task for task in self.tasks if task.stage == stage and task.kind.makes_weight_gradients)
        return next((task.ranks for task in tasks), self.ranks_of(stage))

    @cached_property
    def stage_edges(self) -> tuple[tuple[int, int], ...]:
        """(source, target) stages of the forward edges."""
        pairs = ((self.tasks[edge.source], self.tasks[edge.target]) for edge in self.edges)
        return tuple((a.stage, b.stage) for a, b in pairs if a.kind == b.kind == Kind.F)

    @cached_property
    def component_of(self) -> tuple[int, ...]:
        """For each task the index of its connected component, a data stream."""
        parent = list(range(len(self.tasks)))

        def root(i: int) -> int:
            while parent[i] != i:
                parent[i] = parent[parent[i]]
                i = parent[i]
            return i

        for edge in self.edges:
            parent[root(edge.source)] = root(edge.target)
        for task in range(len(self.tasks)):  # a stage's tasks belong together even without an edge
            parent[root(task)] = root(min(self._tasks_of[self.tasks[task].stage]))
        lowest: dict[int, int] = {}
        for i, task_ in enumerate(self.tasks):
            lowest[root(i)] = min(task_.stage, lowest.get(root(i), task_.stage))
        rank = {component: c for c, component in enumerate(sorted(lowest, key=lowest.__getitem__))}
        return tuple(rank[root(i)] for i in range(len(self.tasks)))

    @cached_property
    def _tasks_of(self) -> Mapping[int, list[int]]:
        tasks: dict[int, list[int]] = {}
        for i, task in enumerate(self.tasks):
            tasks.setdefault(task.stage, []).append(i)
        return tasks

    @cached_property
    def num_components(self) -> int:
        """Number of connected components (data streams)."""
        return max(self.component_of) + 1

    def microbatches(self, stage: int, num_microbatches: int) -> range:
        """The micro-batches, of a step with `num_microbatches`, that `stage` runs."""
        component = self.component_of[self._tasks_of[stage][0]]
        return range(component, num_microbatches, self.num_components)

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        """The transfers of one micro-batch; an edge that stays on one rank has no transfer.

        If both tasks are on equally many ranks, each rank sends to its counterpart, else the source's first rank sends
        to all.
        """
        routes = []
        for edge in self.edges:
            source, target = self.tasks[edge.source], self.tasks[edge.target]
            same = len(source.ranks) == len(target.ranks)
            senders = source.ranks if same else (source.ranks[0],) * len(target.ranks)
            for sender, receiver in zip(senders, target.ranks, strict=True):
                if sender != receiver:
                    routes.append(self._route(edge, sender, receiver))
        return tuple(routes)

    def _route(self, edge: Edge, sender: int, receiver: int) -> Route:
        link, shared = self.cluster.link_between(sender, receiver), self.cluster.shared_between(sender, receiver)
        rates = [self.cluster.shared[i].bytes_per_us for i in shared]
        service_us = -(-edge.num_bytes // min(rates)) if rates else 0
        duration_us = max(link.transfer_us(edge.num_bytes), link.latency_us + service_us)
        return Route(*edge[:2], sender, receiver, edge.num_bytes, duration_us, service_us, shared if service_us else ())

    @cached_property
    def occupied_us(self) -> tuple[tuple[int, int], ...]:
        """For each task the µs that its ranks are occupied before and after an op, by messages and between ops.

        Before an op: the cluster's gap and what receiving its inputs costs. After it: what sending its output costs. Of
        the ranks of a task, the one that is occupied longest counts.
        """
        costs: list[tuple[Counter[int], Counter[int]]] = [(Counter(), Counter()) for _ in self.tasks]
        for route in self.routes:
            link = self.cluster.link_between(route.sender, route.receiver)
            costs[route.target][0][route.receiver] += link.receive_cost_us(route.num_bytes)
            costs[route.source][1][route.sender] += link.send_cost_us(route.num_bytes)
        gap = self.cluster.gap_us
        return tuple((gap + max(a.values(), default=0), max(b.values(), default=0)) for a, b in costs)

    def forward_only(self) -> Placement:
        """The same stages for inference: F tasks alone, which hold no bytes after they end."""
        kept = [i for i, task in enumerate(self.tasks) if task.kind is Kind.F]
        new = {old: i for i, old in enumerate(kept)}
        edges = tuple(Edge(new[a], new[b], size) for a, b, size in self.edges if a in new and b in new)
        tasks = tuple(replace(self.tasks[i], held_bytes=0) for i in kept)
        return Placement(tasks, edges, self.cluster, self.static_bytes, microbatch_rows=self.microbatch_rows)

    def to_fields(self) -> dict[str, Any]:
        """The fields of a placement in JSON."""

        def name(task: int) -> str:
            return str(self.tasks[task])

        return {
            "tasks": [[str(t), list(t.ranks), t.duration_us, t.held_bytes, t.peak_bytes] for t in self.tasks],
            "edges": [[name(edge.source), name(edge.target), edge.num_bytes] for edge in self.edges],
            "cluster": self.cluster.to_fields(),
            "static_bytes": list(self.static_bytes),
            "step_ends": [[end.stage, end.reduce_us, end.optimizer_us] for end in self.step_ends],
            **({} if self.microbatch_rows is None else {"microbatch_rows": self.microbatch_rows}),
        }

    @classmethod
    def from_fields(cls, document: reading.Field) -> Placement:
        """Read what `to_fields` wrote. Raises FormatError or PlacementError."""
        tasks = []
        for entry in document["tasks"]:
            name, ranks, *numbers = _exactly(5, entry)
            stage, kind = _task_name(name)
            duration, held, peak = (number.integer() for number in numbers)
            tasks.append(Task(stage, kind, ranks.integers(0), duration, held, peak))
        index = {str(task): i for i, task in enumerate(tasks)}
        edges = []
        for entry in document["edges"]:
            source, target, size = _exactly(3, entry)
            for end in (source, target):
                if end.text() not in index:
                    raise end.wrong("the name of a task, such as " + next(iter(index), "0F"))
            edges.append(Edge(index[source.text()], index[target.text()], size.integer(0)))
        ends = (tuple(number.integer(0) for number in _exactly(3, entry)) for entry in document["step_ends"])
        return cls(
            tuple(tasks),
            tuple(edges),
            Cluster.from_fields(document["cluster"]),
            document["static_bytes"].integers(0),
            tuple(StepEnd(*end) for end in ends),
            document["microbatch_rows"].integer(1) if "microbatch_rows" in document else None,
        )


def _task_name(field: reading.Field) -> tuple[int, Kind]:
    name = field.text()
    stage, kind = name[:-1], name[-1:]
    if not (stage.isascii() and stage.isdecimal() and len(stage) < 10) or kind not in Kind.__members__:
        raise field.wrong("a stage and one of F B I W R, such as 0F")
    return int(stage), Kind(kind)


def _exactly(count: int, entry: reading.Field) -> list[reading.Field]:
    values = list(entry)
    if len(values) != count:
        raise entry.wrong(f"{count} values")
    return values
