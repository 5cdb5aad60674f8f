"""A placement: the tasks of one micro-batch, the edges between them, and the ranks that run them.

Micro-batches that differ belong to classes: a duration or size is then a `PerClass`, with one number per class.
Micro-batches that are chunks of one sample are related: see `Placement.sample_of`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count

from rota.core.cluster import HOST, Cluster
from rota.core.errors import PlacementError
from rota.core.reading import whole, whole_rows
from rota.core.taskgraph import CycleError, TaskGraph
from rota.core.tasks import (
    Amount,
    Edge,
    Kind,
    Op,
    PerClass,
    Route,
    StepEnd,
    Task,
    Transfer,
    amount_of,
    by_class,
    scalar,
    value_in,
    values_of,
)
from rota.core.text import angle_repr, count_text

_TASK_AMOUNTS = ("duration_us", "held_bytes", "peak_bytes")


@dataclass(frozen=True)
class Placement:
    """Tasks on ranks, and edges between tasks, which form a DAG.

    Each disconnected component is a data stream: with C components, sorted by their lowest stage, component c runs the
    micro-batches c, c + C, c + 2C, …

    Attributes:
        tasks: The tasks; at most one per (stage, kind).
        edges: Edges between tasks, as indexes into `tasks`.
        cluster: The ranks and links.
        static_bytes: Bytes that each rank always holds; default 0.
        state_bytes: Of these, what a checkpoint holds of each rank's stages. Empty: unknown.
        snapshot_bytes: Of each rank's static bytes, those for the states that `rota run --max-restarts` keeps in
            memory. Empty: not counted.
        step_ends: Reductions and optimizer steps; at most one entry per stage.
        microbatch_rows: Examples in the micro-batch whose costs these are. None: unknown.
        class_of: The class of each micro-batch of a step, where micro-batches differ: amounts of tasks and edges may
            then be `rota.core.tasks.PerClass`, with one number per class. Empty: all are alike.
        sample_of: The sample that each micro-batch of a step is a chunk of, where samples are cut along their length.
            Chunks of a sample are in the order of their micro-batches: every stage runs their forwards in this order
            and their backwards (B or I) in reverse. Empty: no sample is cut.

    Raises:
        PlacementError: A task or an edge is invalid, the edges form a cycle, or amounts, classes and samples do not fit
            together.
    """

    tasks: tuple[Task, ...]
    edges: tuple[Edge, ...]
    cluster: Cluster
    static_bytes: tuple[int, ...] = ()
    step_ends: tuple[StepEnd, ...] = ()
    microbatch_rows: int | None = None
    class_of: tuple[int, ...] = ()
    sample_of: tuple[int, ...] = ()
    state_bytes: tuple[int, ...] = ()
    snapshot_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.static_bytes:
            object.__setattr__(self, "static_bytes", (0,) * self.num_ranks)
        for name in ("static_bytes", "state_bytes", "snapshot_bytes"):
            column = getattr(self, name)
            if name != "static_bytes" and not any(column):
                object.__setattr__(self, name, ())
            elif len(column) != self.num_ranks:
                raise PlacementError(f"{name} has {len(column)} entries for {self.num_ranks} ranks")
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
            size = by_class(partial(whole, self._size_name(edge)), edge.num_bytes)
            edges.append(edge._replace(num_bytes=size))
        object.__setattr__(self, "edges", tuple(edges))
        object.__setattr__(self, "class_of", self._checked_classes())
        object.__setattr__(self, "sample_of", self._checked_samples())
        ending = [end.stage for end in self.step_ends]
        if unknown := {*ending} - {*self.stages}:
            raise PlacementError(f"step_ends names stage {min(unknown)}, which has no task")
        if len({*ending}) < len(ending):
            often, _ = Counter(ending).most_common(1)[0]
            raise PlacementError(f"step_ends names stage {often} twice; a stage ends once, so remove one of them")
        self._refuse_cycles()
        self._refuse_half_copies()

    def _checked_classes(self) -> tuple[int, ...]:
        """`class_of`; empty where no amount differs."""
        lengths: dict[int, str] = {}
        for name, amount in self._differing_amounts():
            lengths.setdefault(len(amount.values), name)
        if not lengths:
            return ()
        (num_classes, first), *others = lengths.items()
        if others:
            raise PlacementError(
                f"{first} has numbers for {num_classes} classes of micro-batches, but {others[0][1]} for "
                f"{others[0][0]}; give one number per class everywhere"
            )
        if not self.class_of:
            raise PlacementError(
                f"{first} has numbers for {num_classes} classes of micro-batches, but class_of is empty; give the "
                f"class of each micro-batch"
            )
        classes = tuple(whole(f"class_of[{m}]", class_) for m, class_ in enumerate(self.class_of))
        if max(classes) >= num_classes:
            m = classes.index(max(classes))
            raise PlacementError(f"class_of[{m}] is {classes[m]}, but there are {num_classes} classes, counted from 0")
        return classes

    def _checked_samples(self) -> tuple[int, ...]:
        """`sample_of`; empty where no sample has several chunks."""
        samples = tuple(whole(f"sample_of[{m}]", sample) for m, sample in enumerate(self.sample_of))
        if len({*samples}) == len(samples):
            return ()
        if self.class_of and len(samples) != len(self.class_of):
            raise PlacementError(
                f"sample_of has {len(samples)} entries and class_of {len(self.class_of)}; give one per micro-batch"
            )
        first: dict[int, int] = {}
        for m, sample in enumerate(samples):
            if (m - first.setdefault(sample, m)) % self.num_components:
                raise PlacementError(
                    f"sample_of: micro-batches {first[sample]} and {m} are chunks of one sample, but belong to "
                    f"different data streams; of {self.num_components} streams, each takes every "
                    f"{self.num_components}th micro-batch, so number the chunks in such steps"
                )
        return samples

    def _differing_amounts(self) -> Iterator[tuple[str, PerClass]]:
        """Every amount that is not the same in all classes, with its name."""
        for task in self.tasks:
            for name, amount in zip(_TASK_AMOUNTS, amounts_of(task), strict=True):
                if isinstance(amount, PerClass):
                    yield f"{name} of task {task}", amount
        for edge in self.edges:
            if isinstance(edge.num_bytes, PerClass):
                yield self._size_name(edge), edge.num_bytes

    def _size_name(self, edge: Edge) -> str:
        return f"num_bytes of the edge {self.tasks[edge.source]} -> {self.tasks[edge.target]}"

    def _refuse_cycles(self) -> None:
        inputs: list[list[tuple[int, int]]] = [[] for _ in self.tasks]
        for edge in self.edges:
            inputs[edge.target].append((edge.source, 0))
        try:
            TaskGraph.of([0] * len(self.tasks), inputs).earliest()
        except CycleError as error:
            names = [str(self.tasks[node]) for node in reversed(error.nodes)]
            raise PlacementError(f"the edges form a cycle: {' -> '.join([*names, names[0]])}") from None

    def _refuse_half_copies(self) -> None:
        """Raise PlacementError unless O frees, and L takes, what is copied, over a link between rank and host."""
        for edge in filter(self.is_copy, self.edges):
            source, target = self.tasks[edge.source], self.tasks[edge.target]
            task, other = (target, source) if target.kind is Kind.O else (source, target)
            moved = by_class(lambda held, sign: held * sign, task.held_bytes, -1 if task is target else 1)
            if other.ranks != task.ranks:
                raise PlacementError(f"task {task} is on ranks {task.ranks}, but task {other} on {other.ranks}")
            if moved != edge.num_bytes:
                raise PlacementError(
                    f"{self._size_name(edge)} is {edge.num_bytes}, but held_bytes of task {task} is {task.held_bytes}; "
                    f"O frees what it copied, and L takes it again"
                )
            for rank in task.ranks:
                if not self.cluster.shared_between(*_ends_of_copy(rank, target.kind)):
                    raise PlacementError(
                        f"stage {task.stage} offloads, but the cluster has no shared link between rank {rank} and its "
                        f"host; use cluster.with_host_links(bytes_per_us)"
                    )

    # --- classes of micro-batches ---------------------------------------------------------------------------------

    @classmethod
    def of_classes(
        cls, placements: Sequence[Placement], class_of: Sequence[int], sample_of: Sequence[int] = ()
    ) -> Placement:
        """One placement for micro-batches that differ: those of class c cost what `placements[c]` says.

        Args:
            placements: One per class, with the same tasks, edges, ranks and links; only durations and sizes differ.
            class_of: [num_microbatches]: the class of each micro-batch of a step, as an index into `placements`.
            sample_of: [num_microbatches]: the sample that each of them is a chunk of; empty: no sample is cut.

        Returns:
            The placement; where no amount differs and no sample is cut, the first one.

        Raises:
            PlacementError: The placements differ in more than amounts, one of them has classes or chunks already, or
                `class_of` names other classes.
        """
        if not placements or not class_of:
            raise PlacementError("give at least one placement, one per class, and the class of each micro-batch")
        for c, placement in enumerate(placements):
            if not placement.is_alike:
                raise PlacementError(
                    f"placements[{c}] has classes or chunks of micro-batches itself; give one placement per class"
                )
            shape = _shape_of(placement)
            if differing := [name for name, part in _shape_of(placements[0]).items() if part != shape[name]]:
                raise PlacementError(
                    f"placements[0] and placements[{c}] have different {differing[0]}; give placements in which only "
                    f"durations and sizes differ"
                )
        wrong = next((m for m, c in enumerate(class_of) if not 0 <= c < len(placements)), None)
        if wrong is not None:
            raise PlacementError(f"class_of[{wrong}] is {class_of[wrong]}, but there are {len(placements)} placements")
        tasks = [
            with_amounts(same[0], (amount_of(map(scalar, row)) for row in zip(*map(amounts_of, same), strict=True)))
            for same in zip(*(placement.tasks for placement in placements), strict=True)
        ]
        edges = [
            same[0]._replace(num_bytes=amount_of(scalar(edge.num_bytes) for edge in same))
            for same in zip(*(placement.edges for placement in placements), strict=True)
        ]
        rows = {placement.microbatch_rows for placement in placements}
        return replace(
            placements[0],
            tasks=tuple(tasks),
            edges=tuple(edges),
            microbatch_rows=rows.pop() if len(rows) == 1 else None,
            class_of=tuple(class_of),
            sample_of=tuple(sample_of),
        )

    @cached_property
    def num_classes(self) -> int:
        """Number of classes of micro-batches; 1 where all are alike."""
        return max((len(amount.values) for _, amount in self._differing_amounts()), default=1)

    @cached_property
    def classes(self) -> tuple[Placement, ...]:
        """For each class a placement whose micro-batches are alike, with plain ints; where all are, itself."""
        if self.is_alike:
            return (self,)
        return tuple(self._alike(partial(value_in, class_=c)) for c in range(self.num_classes))

    def _alike(self, value: Callable[[Amount], int]) -> Placement:
        """The placement of micro-batches that are alike, with this value of each amount."""
        tasks = tuple(with_amounts(task, map(value, amounts_of(task))) for task in self.tasks)
        edges = tuple(edge._replace(num_bytes=value(edge.num_bytes)) for edge in self.edges)
        return replace(self, tasks=tasks, edges=edges, class_of=(), sample_of=())

    def for_microbatch(self, microbatch: int) -> Placement:
        """The placement with one micro-batch's amounts, as plain ints; itself where all are alike."""
        return self.classes[self.class_in(microbatch)]

    @cached_property
    def average(self) -> Placement:
        """A placement whose micro-batches are alike, with the mean amounts of the step's; where they are, itself.

        It is for choices that need a typical size, such as the order in which a named schedule starts ops.
        """
        if self.is_alike:
            return self
        weights = [self.class_of.count(c) for c in range(self.num_classes)]

        def mean(amount: Amount) -> int:
            if isinstance(amount, PerClass):
                return round(sum(a * b for a, b in zip(weights, amount.values, strict=True)) / sum(weights))
            return amount

        return self._alike(mean)

    @property
    def is_alike(self) -> bool:
        """Whether all micro-batches are alike: of one class, and none is a chunk of a sample."""
        return not self.class_of and not self.sample_of

    @property
    def given_microbatches(self) -> int | None:
        """How many micro-batches a step has, where they differ; None: any number."""
        return len(self.class_of or self.sample_of) or None

    @cached_property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """For each sample that is cut, its micro-batches, first chunk to last."""
        rows: dict[int, list[int]] = {}
        for m, sample in enumerate(self.sample_of):
            rows.setdefault(sample, []).append(m)
        return tuple(tuple(row) for row in rows.values() if len(row) > 1)

    def backward_sequence(self, microbatches: Iterable[int]) -> list[int]:
        """Micro-batches in the sequence of backwards: sample by sample, each from its last chunk to its first."""
        chunks_of = {m: chunks for chunks in self.chunks for m in chunks}
        sequence: dict[int, None] = {}
        for m in microbatches:
            sequence.update(dict.fromkeys(reversed(chunks_of.get(m, (m,)))))
        return [*sequence]

    def in_chunks(self, num_chunks: int, num_microbatches: int) -> Placement:
        """The placement for a step whose samples are each cut into `num_chunks` chunks.

        Args:
            num_chunks: Chunks per sample, 1 or more.
            num_microbatches: Micro-batches of the step; each chunk is one, so this is a multiple of `num_chunks`, times
                the number of data streams.

        Returns:
            The placement with `sample_of`; itself for 1 chunk.

        Raises:
            PlacementError: The number of micro-batches is not such a multiple.
        """
        if num_chunks < 1 or num_microbatches % (num_chunks * self.num_components):
            streams = f" in each of {self.num_components} data streams" if self.num_components > 1 else ""
            raise PlacementError(
                f"{num_microbatches} micro-batches are not a whole number of samples of {num_chunks} chunks{streams}; "
                f"give a multiple of {max(num_chunks, 1) * self.num_components}"
            )
        streams_of = ((m // self.num_components, m % self.num_components) for m in range(num_microbatches))
        return replace(self, sample_of=tuple(k // num_chunks * self.num_components + c for k, c in streams_of))

    def require_alike(self, what: str) -> None:
        """Raises PlacementError if micro-batches differ, which `what` does not support."""
        if self.sample_of:
            raise PlacementError(
                f"{what} does not support chunks of samples, but this placement cuts {len(self.chunks)} samples into "
                f"chunks; give it one class, placement.classes[0], or placement.average"
            )
        if self.class_of:
            raise PlacementError(
                f"{what} takes micro-batches that are all alike, but those of this placement belong to "
                f"{self.num_classes} classes; give it one class, placement.classes[0] to "
                f"placement.classes[{self.num_classes - 1}], or placement.average"
            )

    def class_in(self, microbatch: int) -> int:
        """The class of a micro-batch, an index into `classes`; 0 where all are alike."""
        return self.class_of[microbatch] if self.class_of else 0

    def value(self, amount: Amount, microbatch: int) -> int:
        """The number of one micro-batch of an amount of a task, an edge or a route."""
        return amount.values[self.class_of[microbatch]] if isinstance(amount, PerClass) else amount

    def column(self, amount: Amount, microbatches: Sequence[int]) -> list[int]:
        """`value` for several micro-batches."""
        if isinstance(amount, PerClass):
            return [amount.values[self.class_of[m]] for m in microbatches]
        return [amount] * len(microbatches)

    # --- tasks, stages and ranks ----------------------------------------------------------------------------------

    def __str__(self) -> str:
        """One line."""
        sizes = f"{count_text(len(self.stages), 'stage')} on {count_text(self.num_ranks, 'rank')}"
        return f"Placement of {sizes}, {count_text(len(self.tasks), 'task')}"

    __repr__ = angle_repr

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
        return tuple(self._component_of_stage[task.stage] for task in self.tasks)

    @cached_property
    def _component_of_stage(self) -> Mapping[int, int]:
        connected = {stage: [stage] for stage in self.stages}  # the stages of its component
        for edge in self.edges:
            first, second = (connected[self.tasks[task].stage] for task in edge[:2])
            if first is not second:
                first += second
                connected.update(dict.fromkeys(second, first))
        components: dict[int, int] = {}
        indexes = count()
        for stage in self.stages:  # in ascending order
            if stage not in components:
                components.update(dict.fromkeys(connected[stage], next(indexes)))
        return components

    @cached_property
    def num_components(self) -> int:
        """Number of connected components (data streams)."""
        return max(self._component_of_stage.values()) + 1

    def microbatches(self, stage: int, num_microbatches: int) -> range:
        """The micro-batches, of a step with `num_microbatches`, that `stage` runs."""
        return range(self._component_of_stage[stage], num_microbatches, self.num_components)

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        """The transfers of one micro-batch; an edge that stays on one rank has no transfer, unless it is a copy.

        If both tasks are on the same number of ranks, each rank sends to its counterpart; otherwise the source's first
        rank sends to all ranks.
        """
        routes = []
        for edge in self.edges:
            source, target = self.tasks[edge.source], self.tasks[edge.target]
            same = len(source.ranks) == len(target.ranks)
            senders = source.ranks if same else (source.ranks[0],) * len(target.ranks)
            for sender, receiver in zip(senders, target.ranks, strict=True):
                if sender != receiver:
                    routes.append(self._route(edge, sender, receiver))
                elif self.is_copy(edge):
                    route = self._route(edge, *_ends_of_copy(sender, target.kind))
                    routes.append(route._replace(sender=sender, receiver=receiver, num_bytes=0))
        return tuple(routes)

    def is_copy(self, edge: Edge) -> bool:
        """Whether an edge is a copy between a rank and its host: from F to O, or from L to the backward."""
        source, target = self.tasks[edge.source], self.tasks[edge.target]
        return source.stage == target.stage and (
            target.kind is Kind.O or (source.kind is Kind.L and not target.kind.is_copy)
        )

    def ends_of(self, route: int) -> tuple[int, int]:
        """The ends of the link that `routes[route]` takes; of a copy one of them is `rota.core.cluster.HOST`."""
        sender, receiver = self.routes[route][2:4]
        copy = self.tasks[self.routes[route].target].kind
        return _ends_of_copy(sender, copy) if self.routes[route].is_copy else (sender, receiver)

    def copies_on(self, rank: int) -> dict[tuple[int, Kind], int]:
        """By (stage, kind) of each O and L on `rank`, the index in `routes` of its copy."""
        return {
            (task.stage, task.kind): r
            for r, route in enumerate(self.routes)
            if route.is_copy and route.sender == rank
            for task in (self.tasks[route.source], self.tasks[route.target])
            if task.kind.is_copy
        }

    def moved_bytes(self, route: int) -> Amount:
        """What `routes[route]` carries, also where that is held by its tasks."""
        source, target, *_, size = self.routes[route][:5]
        if not self.routes[route].is_copy:
            return size
        task = self.tasks[target if self.tasks[target].kind is Kind.O else source]
        return by_class(abs, task.held_bytes)

    def microbatches_on(self, route: int, num_microbatches: int) -> range:
        """The micro-batches, of a step with `num_microbatches`, whose data travels on `routes[route]`."""
        return self.microbatches(self.tasks[self.routes[route].source].stage, num_microbatches)

    def transfer(self, route: int, microbatch: int) -> Transfer:
        """The transfer of a micro-batch on `routes[route]`."""
        source, target, sender, receiver, size = self.routes[route][:5]
        a, b = self.tasks[source], self.tasks[target]
        num_bytes = self.value(size, microbatch)
        return Transfer(Op(a.stage, a.kind, microbatch), Op(b.stage, b.kind, microbatch), sender, receiver, num_bytes)

    def _route(self, edge: Edge, sender: int, receiver: int) -> Route:
        link, shared = self.cluster.link_between(sender, receiver), self.cluster.shared_between(sender, receiver)
        rate = min((self.cluster.shared[i].bytes_per_us for i in shared), default=None)
        size = edge.num_bytes
        if rate is None:
            return Route(*edge[:2], sender, receiver, size, by_class(link.transfer_us, size))
        service_us = by_class(lambda num_bytes: -(-num_bytes // rate), size)
        if service_us != 0 and 0 in values_of(service_us):
            raise PlacementError(
                f"the edge {self.tasks[edge.source]} -> {self.tasks[edge.target]} has 0 bytes for some classes of "
                f"micro-batches and uses a shared link for others; give at least 1 byte everywhere"
            )
        duration_us = by_class(
            lambda num_bytes, service: max(link.transfer_us(num_bytes), link.latency_us + service), size, service_us
        )
        return Route(*edge[:2], sender, receiver, size, duration_us, service_us, shared if service_us != 0 else ())

    def forward_only(self) -> Placement:
        """The same stages for inference: only F tasks, which hold no bytes after they end."""
        forwards = [i for i, task in enumerate(self.tasks) if task.kind is Kind.F]
        index = {task: i for i, task in enumerate(forwards)}
        edges = tuple(Edge(index[a], index[b], size) for a, b, size in self.edges if a in index and b in index)
        tasks = tuple(replace(self.tasks[i], held_bytes=0) for i in forwards)
        return replace(self, tasks=tasks, edges=edges, step_ends=())

    def with_step_ends(self, stages: Iterable[int]) -> Placement:
        """The same with a step end of length 0 for each of these stages that has none."""
        more = sorted({*stages} - {end.stage for end in self.step_ends})
        return replace(self, step_ends=(*self.step_ends, *(StepEnd(stage, 0, 0) for stage in more))) if more else self


def _ends_of_copy(rank: int, target: Kind) -> tuple[int, int]:
    """Where a copy of `rank` comes from and goes to, by the kind of the task that waits for it."""
    return (rank, HOST) if target is Kind.O else (HOST, rank)


def amounts_of(task: Task) -> tuple[Amount, Amount, Amount]:
    """The task's duration, held bytes and peak bytes."""
    return task.duration_us, task.held_bytes, task.peak_bytes


def with_amounts(task: Task, amounts: Iterable[Amount]) -> Task:
    """The task with another duration, held bytes and peak bytes."""
    duration_us, held_bytes, peak_bytes = amounts
    return replace(task, duration_us=duration_us, held_bytes=held_bytes, peak_bytes=peak_bytes)


def _shape_of(placement: Placement) -> dict[str, object]:
    """What all classes of micro-batches have in common."""
    return {
        "tasks or ranks": [(task.stage, task.kind, task.ranks) for task in placement.tasks],
        "edges": [edge[:2] for edge in placement.edges],
        "clusters": placement.cluster,
        "static_bytes": placement.static_bytes,
        "step_ends": placement.step_ends,
    }
