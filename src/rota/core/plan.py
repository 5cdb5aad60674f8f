"""A plan: for each rank its ops in execution order, and the order of the transfers that follows from it."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain, pairwise, repeat, zip_longest
from operator import sub
from typing import Any, TypeVar

from rota.core import notebook, reading, schedule_csv, services
from rota.core.errors import FormatError, PlanError
from rota.core.figures import each, value_in
from rota.core.placement import Placement, PlacementFile
from rota.core.services import Services
from rota.core.taskgraph import CycleError, Earliest, Edges, TaskGraph
from rota.core.tasks import Kind, Op, Transfer
from rota.core.units import angle_repr, count_text
from rota.core.usage import Usage
from rota.core.whole_numbers import Positive

_MAX_CYCLE_WAITS = 12  # waits of a cycle in an error message
_MAX_TRANSFERS = 10_000_000  # in a plan from a file


@dataclass(frozen=True)
class Plan:
    """What each rank runs, in order. The constructor checks nothing; see `rota.check`.

    Attributes:
        placement: Tasks, edges, ranks and links.
        num_microbatches: Number of micro-batches of a step, over all data streams.
        orders: For each rank its ops, first to last.
        usage: Cuts, micro-batch size and replicas, if they were decided together with the plan.
        service_orders: For each shared link of the cluster its transfers, in the order in which it serves them. Empty:
            first come, first served; if several come at once, the one on the first route is served first, then the
            earliest micro-batch.
    """

    placement: Placement
    num_microbatches: int
    orders: tuple[tuple[Op, ...], ...]
    usage: Usage | None = None
    service_orders: tuple[tuple[Transfer, ...], ...] = ()

    def __post_init__(self) -> None:
        for name in ("orders", "service_orders"):
            object.__setattr__(self, name, tuple(tuple(order) for order in getattr(self, name)))

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        """Number of stages of the model; a placement with several data streams has a copy per stream."""
        return self.placement.num_stages // self.placement.num_components

    @property
    def cuts(self) -> tuple[str, ...] | None:
        """Where to cut the model: `rota.split(model, plan.num_stages, plan.cuts)`. None: not decided."""
        return None if self.usage is None else self.usage.cuts

    @property
    def microbatch_rows(self) -> int | None:
        """The examples of the micro-batch that its times and bytes are for. None: unknown."""
        known = self.placement.microbatch_rows
        return self.usage.microbatch_rows if known is None and self.usage is not None else known

    # --- the plan as a graph -------------------------------------------------------------------------------------
    # Nodes: the ops of task t are first_node[t], first_node[t] + 1, …, one per micro-batch of its data stream. After
    # all ops come two nodes, a reduction and an optimizer step, for each of `step_end_ranks`; then the transfers on
    # shared links, route after route: a node is the time for which a transfer occupies them.

    @cached_property
    def first_node(self) -> tuple[int, ...]:
        """The first node of each task, and as the last entry the number of ops."""
        first = [0]
        for task in self.placement.tasks:
            first.append(first[-1] + len(self.placement.microbatches(task.stage, self.num_microbatches)))
        return tuple(first)

    @property
    def num_ops(self) -> int:
        """Number of ops; an op on several ranks counts once."""
        return self.first_node[-1]

    def node(self, op: Op) -> int:
        """The op's node in `graph`."""
        task = self.placement.index[op.stage, op.kind]
        return self.first_node[task] + op.microbatch // self.placement.num_components

    def op(self, node: int) -> Op:
        """The op of a node."""
        task = next(t for t, first in enumerate(self.first_node[1:]) if node < first)
        stage, kind = self.placement.tasks[task].stage, self.placement.tasks[task].kind
        return Op(stage, kind, self.placement.microbatches(stage, self.num_microbatches)[node - self.first_node[task]])

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """`orders` as nodes. Raises PlanError unless each rank has exactly the ops that are placed on it."""
        if self.num_microbatches < 1:
            raise PlanError(f"num_microbatches is {self.num_microbatches}; a step needs at least 1", "missing")
        given = self.placement.given_microbatches
        if given not in (None, self.num_microbatches):
            raise PlanError(
                f"num_microbatches is {self.num_microbatches}, but the placement has the sizes of {given} "
                f"micro-batches; give as many",
                "unknown",
            )
        if self.num_ranks != self.placement.num_ranks:
            raise PlanError(
                f"the plan has {self.num_ranks} rank orders, but its placement has {self.placement.num_ranks} ranks; "
                f"give one order per rank, an empty one for a rank without ops",
                "unknown",
            )
        nodes = tuple(self._nodes_on(rank) for rank in range(self.num_ranks))
        # Only now, because an op on the wrong rank is also missing on the right one.
        for rank in range(self.num_ranks):
            self._require_complete(rank, nodes[rank])
        if self.placement.sample_of:
            self._require_chunks_in_order()
        return nodes

    def _nodes_on(self, rank: int) -> tuple[int, ...]:
        tasks = [t for t, task in enumerate(self.placement.tasks) if rank in task.ranks]
        if sum(len(self.microbatches_of(t)) for t in tasks) != len(self.orders[rank]):
            # Not complete. A file may claim more micro-batches than fit in memory, so only the ops it has are listed.
            return tuple(self._node_of(op, rank) for op in self.orders[rank])
        here: dict[tuple[int, Kind, int], int] = {}
        for t in tasks:
            task = self.placement.tasks[t]
            ops = zip(repeat(task.stage), repeat(task.kind), self.microbatches_of(t))
            here.update(zip(ops, range(self.first_node[t], self.first_node[t + 1]), strict=True))
        nodes = tuple(map(here.get, self.orders[rank]))
        if None in nodes:
            raise self._misplaced(self.orders[rank][nodes.index(None)], rank)
        return nodes  # type: ignore[return-value]

    def _node_of(self, op: Op, rank: int) -> int:
        """The node of an op, which must be one of the rank's."""
        t = self.placement.index.get(op[:2])
        if t is None or rank not in self.placement.tasks[t].ranks or op.microbatch not in self.microbatches_of(t):
            raise self._misplaced(op, rank)
        return self.first_node[t] + self.microbatches_of(t).index(op.microbatch)

    @cached_property
    def variants(self) -> tuple[int, ...]:
        """For each op's node its task t and its micro-batch's class c as one number, t · num_classes + c."""
        num_classes, class_in, variants = self.placement.num_classes, self.placement.class_in, list[int]()
        for t in range(len(self.placement.tasks)):
            first, batches = t * num_classes, self.microbatches_of(t)
            variants += [first] * len(batches) if num_classes == 1 else [first + class_in(m) for m in batches]
        return tuple(variants)

    def _require_complete(self, rank: int, nodes: Sequence[int]) -> None:
        if len(set(nodes)) != len(nodes):
            twice = next(op for op, count in Counter(self.orders[rank]).items() if count > 1)
            raise PlanError(f"rank {rank} does {twice} twice; remove one of them", "duplicate")
        tasks = [task for task in self.placement.tasks if rank in task.ranks]
        here = [(task, self.placement.microbatches(task.stage, self.num_microbatches)) for task in tasks]
        expected = sum(len(batches) for _, batches in here)
        if len(nodes) != expected:
            planned = set(self.orders[rank])
            every = (Op(task.stage, task.kind, m) for task, batches in here for m in batches)
            first = next(op for op in every if op not in planned)
            more = f" and {expected - len(nodes) - 1} more" if expected - len(nodes) > 1 else ""
            raise PlanError(f"rank {rank} never does {first}{more}; add it there, or lower num_microbatches", "missing")

    def _require_chunks_in_order(self) -> None:
        """Refuse a rank that runs chunks of a sample in another order than forwards first to last, backwards back."""
        chunk_before = {m: before for row in self.placement.chunks for before, m in pairwise(row)}
        chunk_after = {before: m for m, before in chunk_before.items()}
        for rank, order in enumerate(self.orders):
            done: set[Op] = set()
            for op in order:
                needs = chunk_before if op.kind is Kind.F else chunk_after if op.kind in (Kind.B, Kind.I) else {}
                if op.microbatch in needs and (first := op._replace(microbatch=needs[op.microbatch])) not in done:
                    which = "an earlier" if op.kind is Kind.F else "a later"
                    raise PlanError(
                        f"rank {rank} does {op} before {first}, {which} chunk of the same sample; do chunks forward "
                        f"in order and backward in reverse",
                        "chunks",
                    )
                done.add(op)

    def _misplaced(self, op: Op, rank: int) -> PlanError:
        does = f"rank {rank} does {op}"
        task = self.placement.task(op.stage, op.kind)
        if task is None:
            kinds = sorted(t.kind for t in self.placement.tasks if t.stage == op.stage)
            there = f"there are {self.placement.num_stages} stages"
            has = f"stage {op.stage} has {' '.join(kinds)}" if kinds else there
            return PlanError(f"{does}, which the placement does not know ({has})", "unknown")
        batches = self.placement.microbatches(op.stage, self.num_microbatches)
        if op.microbatch not in batches:
            there = f"{batches[0]} to {batches[-1]}" if batches else "none"
            step = f" in steps of {batches.step}" if batches.step > 1 else ""
            return PlanError(f"{does}, but stage {op.stage} has the micro-batches {there}{step}", "unknown")
        ranks = ", ".join(map(str, task.ranks))
        return PlanError(f"{does}, but stage {op.stage} is on rank {ranks}; move it there", "wrong rank")

    def _last_gradient(self, stage: int, rank: int) -> int:
        """Position in the rank's order of the op that completes the stage's gradients; -1 if it makes none."""
        order = self.orders[rank]
        kinds = [task.kind for task in self.placement.tasks if task.stage == stage and task.kind.makes_weight_gradients]
        last = ((i, order[i]) for i in range(len(order) - 1, -1, -1))
        return next((i for i, op in last if op.stage == stage and op.kind in kinds), -1)

    @cached_property
    def step_end_ranks(self) -> tuple[tuple[int, int], ...]:
        """(index into `placement.step_ends`, rank) of every reduction and optimizer step, in graph order.

        On each rank they are in the order of the stages' last gradients.
        """
        ends = self.placement.step_ends
        pairs = [(i, rank) for i, end in enumerate(ends) for rank in self.placement.gradient_ranks(end.stage)]
        return tuple(sorted(pairs, key=lambda pair: (pair[1], self._last_gradient(ends[pair[0]].stage, pair[1]))))

    @cached_property
    def services(self) -> Services:
        """The transfers on shared links. Raises PlanError as `nodes` does."""
        if not any(route.shared for route in self.placement.routes):
            return Services(self.placement, self.num_microbatches, self.num_ops)
        _ = self.nodes  # which refuses orders that are too few, and a num_microbatches that is too large
        return Services(self.placement, self.num_microbatches, self.num_ops + 2 * len(self.step_end_ranks))

    @cached_property
    def served(self) -> tuple[tuple[int, ...], ...]:
        """For each shared link the nodes of its transfers in order of service. Raises PlanError for a wrong order."""
        if self.service_orders:
            return self.services.nodes_of(self.service_orders)
        starts_us = self.earliest.starts_us
        return tuple(tuple(sorted(nodes, key=lambda node: (starts_us[node], node))) for nodes in self.services.of_links)

    def duration_us(self, op: Op) -> int:
        """How long an op runs."""
        task = self.placement.tasks[self.placement.index[op[:2]]]
        return self.placement.value(task.duration_us, op.microbatch)

    def microbatches_on(self, route: int) -> range:
        """The micro-batches whose data travels on `placement.routes[route]`."""
        return self.microbatches_of(self.placement.routes[route].source)

    def microbatches_of(self, task: int) -> range:
        """The micro-batches of `placement.tasks[task]`, in the order of its nodes."""
        return self.placement.microbatches(self.placement.tasks[task].stage, self.num_microbatches)

    @cached_property
    def graph(self) -> TaskGraph:
        """Ops, step ends and transfers on shared links, and what each waits for. Raises PlanError as `nodes` does."""
        if not self.services.first and not self.service_orders:
            return self._unserved_graph
        graph = self._unserved_graph
        edges, previous = [*graph.edges], [*graph.previous]
        _add_orders(self.served, edges, previous)
        return TaskGraph(graph.durations_us, edges, previous)

    @cached_property
    def _unserved_graph(self) -> TaskGraph:
        """The graph in which transfers do not wait for each other."""
        # Orders come first, because they refuse a num_microbatches that would make the graph too large for memory.
        orders = self.nodes
        ends = [(self.placement.step_ends[i].stage, rank) for i, rank in self.step_end_ranks]
        last = [self._last_gradient(*end) for end in ends]
        gradients = [orders[rank][k] if k >= 0 else None for k, (_, rank) in zip(last, ends, strict=True)]
        return _graph_of(self, orders, gradients)

    @cached_property
    def earliest(self) -> Earliest:
        """Earliest start and end of each node. Raises PlanError; for a cycle it names the waits."""
        try:
            if self.services.first and not self.service_orders:
                routes = self.placement.routes
                servers = {
                    first + k: routes[r].shared
                    for r, first in self.services.first.items()
                    for k in range(len(self.microbatches_on(r)))
                }
                return self._unserved_graph.first_come(servers)
            by_position = chain.from_iterable(zip_longest(*self.nodes, fillvalue=-1))
            return self.graph.earliest(by_position)
        except CycleError as error:
            raise PlanError(self._describe_cycle(error.nodes), "cycle") from None

    def _describe_cycle(self, nodes: list[int]) -> str:
        data = {(edge.source, edge.target) for edge in self.placement.edges}
        waits = list(zip(nodes, nodes[1:] + nodes[:1], strict=True))
        half, more = _MAX_CYCLE_WAITS // 2, len(waits) - _MAX_CYCLE_WAITS
        lines: list[str] = []
        for node, before in waits if more <= 0 else waits[:half] + waits[-half:]:
            if max(node, before) >= self.num_ops:
                lines.append(self._service_wait(node, before))
                continue
            op, other = self.op(node), self.op(before)
            reads = (self.placement.index[other[:2]], self.placement.index[op[:2]]) in data
            if reads and op.microbatch == other.microbatch:
                lines.append(f"{op} reads what {other} makes")
            else:
                rank = next(r for r, order in enumerate(self.orders) if (other, op) in pairwise(order))
                lines.append(f"{op} comes after {other} in rank {rank}'s order")
        if more > 0:
            lines.insert(half, f"… {more} more waits …")
        return "the orders wait in a cycle: " + "; ".join(lines)

    def _service_wait(self, node: int, before: int) -> str:
        """Why one node of a cycle waits for another, of which at least one is the service of a transfer."""
        transfers = dict(self.services.transfers())
        if node in transfers and before in transfers:
            for link, nodes in zip(self.placement.cluster.shared, self.served, strict=True):
                if (before, node) in pairwise(nodes):
                    return f"{transfers[node]} comes after {transfers[before]} in the order of {link.name}"
        if node in transfers:
            return f"{transfers[node]} carries what {self.op(before)} makes"
        return f"{self.op(node)} reads what {transfers[before]} carries"

    # --- transfers ------------------------------------------------------------------------------------------------

    @cached_property
    def wire_order(self) -> tuple[Op | Transfer, ...]:
        """All ops and transfers in one global order, in which every rank starts them.

        The order is by simulated start; ties are broken by dependencies, so each action comes after all that it needs.
        A transfer starts when its op ends; one that a shared link serves later, before the op during which it is
        served, so that ranks send in the order of service. Sequential processes that all follow one global order cannot
        deadlock: the first action that is not done has nothing left to wait for. This holds even if a send waits for
        its receive, and if each pair of ranks is one ordered channel. Raises PlanError as `earliest` does.
        """
        earliest = self.earliest
        starts, ends = earliest.starts_us, earliest.ends_us
        actions: list[tuple[int, float, int, int, Op | Transfer]] = []
        position = {node: i for i, node in enumerate(earliest.sequence)}
        num_components = self.placement.num_components
        outgoing: list[list[int]] = [[] for _ in self.placement.tasks]
        for i, route in enumerate(self.placement.routes):
            outgoing[route.source].append(i)
        starts_on = [[starts[node] for node in nodes] for nodes in self.nodes] if self.services.first else []
        for t, task in enumerate(self.placement.tasks):
            component, first = self.placement.component_of[t], self.first_node[t]
            for k in range(self.first_node[t + 1] - first):
                op, node = Op(task.stage, task.kind, k * num_components + component), first + k
                actions.append((starts[node], position[node], -1, -1, op))
                for i in outgoing[t]:
                    since, after, served = ends[node], float(position[node]), 0
                    if i in self.services.first and (served := starts[self.services.first[i] + k]) > since:
                        sender = self.placement.routes[i].sender
                        running = bisect_right(starts_on[sender], served) - 1
                        there = self.nodes[sender][running]
                        if ends[there] > served:
                            since, after = starts[there], position[there] - 0.5
                        else:
                            since, after = served, position[there] + 0.5
                    actions.append((since, after, served, i, self.placement.transfer(i, op.microbatch)))
        return tuple(action for *_, action in sorted(actions, key=lambda entry: entry[:4]))

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """All transfers in the order in which they are sent."""
        return tuple(action for action in self.wire_order if isinstance(action, Transfer))

    # --- text and notebooks -------------------------------------------------------------------------------------------

    def to_csv(self, *, communication: bool = False, overlap: bool = False) -> str:
        """The plan as PyTorch's schedule CSV, such as "0F0,0B0"; see `rota.core.schedule_csv`.

        Args:
            communication: Include sends, receives and reductions.
            overlap: Combine a forward and the next backward into OVERLAP_F_B where possible.

        Raises:
            ScheduleError: The CSV cannot express the plan.
        """
        schedule_csv.require_chain(self.placement)
        wire = self.wire_order if communication or overlap else ()
        return schedule_csv.write(self.orders, wire, communication, overlap)

    @classmethod
    def from_csv(cls, text: str, placement: Placement) -> Plan:
        """Read PyTorch's schedule CSV, with or without communication. Raises FormatError, which names line and cell."""
        orders = schedule_csv.read(text, placement)
        return cls(placement, max((op.microbatch for order in orders for op in order), default=-1) + 1, orders)

    def to_json(self) -> str:
        """The text of a "plan" file, one line per rank, which `from_json` reads."""
        return reading.dump("plan", self.to_fields(), Plan.from_json)

    def to_fields(self) -> dict[str, Any]:
        """The fields of a plan in JSON."""
        return reading.to_fields(PlanFile(**self.to_file()))

    def to_file(self) -> dict[str, Any]:
        """The fields of a `PlanFile`."""
        return {
            "num_microbatches": self.num_microbatches,
            "orders": tuple(" ".join(map(str, order)) for order in self.orders),
            "service_orders": tuple(services.to_texts(self.placement, self.service_orders)),
            "usage": self.usage,
            **self.placement.to_file(),
        }

    def __str__(self) -> str:
        """One line."""
        sizes = f"{count_text(self.num_ranks, 'rank')}, {count_text(self.num_stages, 'stage')}"
        return f"Plan of {sizes}, {self.step_text}, {count_text(self.num_ops, 'op')}"

    __repr__ = angle_repr

    @property
    def step_text(self) -> str:
        """How many micro-batches the step has, and how many of them are chunks."""
        text = count_text(self.num_microbatches, "micro-batch", "es")
        chunks = self.placement.chunks
        return f"{text} ({sum(map(len, chunks))} chunks of {count_text(len(chunks), 'sample')})" if chunks else text

    def _repr_html_(self) -> str:
        """A picture of the simulated plan, or why it cannot run."""
        try:
            starts, ends = self.earliest.starts_us, self.earliest.ends_us
        except PlanError as error:
            return notebook.document(notebook.heading("Plan", ["cannot run"]), notebook.preformatted(str(error)))
        columns = [[[times[node] for node in nodes] for nodes in self.nodes] for times in (starts, ends)]
        last = max(ends, default=0)
        facts = [count_text(self.num_ranks, "rank"), self.step_text]
        facts.append(f"makespan {last:,} µs")
        rows = notebook.op_bars(self.orders, *columns)
        return notebook.document(notebook.heading("Plan", facts), notebook.chart(rows, last))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote. Raises FormatError or PlacementError, which name the field."""
        return cls.from_fields(reading.parse(text, "plan"))

    @classmethod
    def from_fields(cls, document: reading.Field) -> Plan:
        """Read what `to_fields` wrote. Raises FormatError or PlacementError."""
        return cls.from_file(read_file(document, PlanFile), document.path)

    @classmethod
    def from_file(cls, file: PlanFile, path: str) -> Plan:
        """What `to_file` wrote, at this path of a document. Raises FormatError or PlacementError."""
        orders = tuple(
            tuple(schedule_csv.parse_ops(order.split(), f"{path}.orders[{i}], op"))
            for i, order in enumerate(file.orders)
        )
        plan = cls(Placement.from_file(file, path), file.num_microbatches, orders, file.usage)
        plan._limit_transfers(path)
        rows = [
            services.read(plan.placement, plan.num_microbatches, row, f"{path}.service_orders[{i}]")
            for i, row in enumerate(file.service_orders)
        ]
        return replace(plan, service_orders=tuple(rows)) if rows else plan

    def _limit_transfers(self, path: str) -> None:
        """Raise FormatError if few bytes in a file make too many transfers: one per micro-batch and reader's rank."""
        rounds = min(self.num_microbatches, max(map(len, self.orders), default=0))  # further ones lack their ops
        tasks = self.placement.tasks
        num_transfers = sum(len(tasks[edge.target].ranks) for edge in self.placement.edges) * max(rounds, 1)
        if num_transfers > _MAX_TRANSFERS:
            raise FormatError(f"{path}.edges make {num_transfers:,} transfers; a file may have {_MAX_TRANSFERS:,}")


_File = TypeVar("_File", bound="PlanFile")


class PlanFile(PlacementFile, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A plan in JSON: its placement, and the orders of ranks and of shared links, each as one text."""

    num_microbatches: Positive
    orders: tuple[str, ...]
    service_orders: tuple[str, ...] = ()
    usage: Usage | None = None


def read_file(document: reading.Field, into: type[_File]) -> _File:
    """The plan, or what has more fields, in a document. Raises FormatError, also for unknown fields."""
    if "usage" in document:
        document["usage"].refuse_others([field.name for field in fields(Usage)])
    return document.read(into)


# --- building the graph -----------------------------------------------------------------------------------------------


def _graph_of(plan: Plan, orders: Sequence[Sequence[int]], gradients: Sequence[int | None]) -> TaskGraph:
    """`Plan._unserved_graph`. `gradients[j]`: the node, if any, that completes those of `plan.step_end_ranks[j]`."""
    placement, first_node = plan.placement, plan.first_node
    durations: list[int] = []
    edges: list[Edges] = []
    inputs = _task_inputs(placement, first_node, plan.services.first)
    for t, (task, sources, first) in enumerate(zip(placement.tasks, inputs, first_node, strict=False)):
        batches = plan.microbatches_of(t)
        durations += placement.column(task.duration_us, batches)
        of_class = [
            tuple((first - source, value_in(lag, c)) for source, lag in sources) for c in range(placement.num_classes)
        ]
        edges += [of_class[placement.class_of[m]] for m in batches] if placement.class_of else of_class * len(batches)
    previous = [-1] * len(durations)
    _add_orders(orders, edges, previous)
    _add_step_ends(placement, orders, plan.step_end_ranks, gradients, durations, edges)
    for r, first in plan.services.first.items():
        route, batches = placement.routes[r], plan.microbatches_on(r)
        durations += placement.column(route.service_us, batches)
        edges += [((first - first_node[route.source], 0),)] * len(batches)
    previous += [-1] * (len(durations) - len(previous))
    return TaskGraph(durations, edges, previous)


def _task_inputs(
    placement: Placement, first_node: Sequence[int], first_service: Mapping[int, int]
) -> list[list[tuple[int, int]]]:
    """For each task the first nodes of its inputs, with the lags of the transfers, which are figures."""
    lags: dict[tuple[int, int], int] = {(edge.source, edge.target): 0 for edge in placement.edges}
    sources: list[list[tuple[int, int]]] = [[] for _ in placement.tasks]
    for r, route in enumerate(placement.routes):
        if r in first_service:
            sources[route.target].append((first_service[r], each(sub, route.duration_us, route.service_us)))
            lags.pop((route.source, route.target), None)
    for r, route in enumerate(placement.routes):
        if r not in first_service:
            edge = route.source, route.target
            lags[edge] = each(max, lags.get(edge, 0), route.duration_us)
    for (source, target), lag in lags.items():
        sources[target].append((first_node[source], lag))
    return sources


def _add_orders(orders: Sequence[Sequence[int]], edges: list[Edges], previous: list[int]) -> None:
    """Append that the nodes of each order wait for one another: in `previous`, unless a node is in several orders."""
    is_followed = bytearray(len(previous))
    for nodes in orders:
        for before, node in pairwise(nodes):
            if previous[node] < 0 and not is_followed[before]:
                previous[node], is_followed[before] = before, True
            else:
                edges[node] += ((node - before, 0),)


def _add_step_ends(
    placement: Placement,
    orders: Sequence[Sequence[int]],
    step_end_ranks: Sequence[tuple[int, int]],
    gradients: Sequence[int | None],
    durations: list[int],
    edges: list[Edges],
) -> None:
    """Append step ends: a rank's reductions in sequence, each after its stage's gradients, then its optimizer steps."""
    first: dict[int, int] = {}  # rank -> node of its first, and of its last reduction
    last: dict[int, int] = {}
    for j, (_, rank) in enumerate(step_end_ranks):
        first.setdefault(rank, len(durations) + 2 * j)
        last[rank] = len(durations) + 2 * j
    for (i, rank), made in zip(step_end_ranks, gradients, strict=True):
        end, reduction = placement.step_ends[i], len(durations)
        durations += [end.reduce_us, end.optimizer_us]
        to_reduce = [] if made is None else [made]
        if reduction == first[rank]:
            to_optimize = [*orders[rank][-1:], last[rank]]
        else:
            to_reduce, to_optimize = [*to_reduce, reduction - 2], [reduction - 1]
        for node, inputs in ((reduction, to_reduce), (reduction + 1, to_optimize)):
            edges.append(tuple((node - before, 0) for before in inputs))
