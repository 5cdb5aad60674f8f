"""A plan: for each rank its ops in execution order, and the order of the transfers that follows from it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise, zip_longest
from operator import sub
from typing import Any, TypeVar

from rota.core import reading, schedule_csv, shared_links
from rota.core.errors import FormatError, PlacementError, PlanError
from rota.core.layers import ESTIMATED
from rota.core.orders import first_nodes, nodes_of
from rota.core.placement import Placement
from rota.core.placement_file import PlacementFile, placement_fields, read_placement
from rota.core.reading import Name, Positive
from rota.core.shared_links import SharedTransfers
from rota.core.taskgraph import CycleError, Earliest, Edges, TaskGraph
from rota.core.tasks import Amount, Op, Transfer, by_class, parse_ops, value_in
from rota.core.text import angle_repr, count_text

_MAX_CYCLE_WAITS = 12  # waits of a cycle in an error message
_MAX_TRANSFERS = 10_000_000  # in a plan from a file
_FROM_RUN = "measured in a run"


@dataclass(frozen=True, slots=True)
class Usage:
    """Cuts, micro-batch size and replicas of a plan.

    Attributes:
        cuts: Where `rota.split` cuts the model.
        microbatch_rows: Examples in one micro-batch of one replica.
        num_replicas: Number of pipelines in a step, each with the plan's micro-batches.
        num_layers: Number of layers of each stage; a layer is what is between two adjacent places where the model may
            be cut. Empty: unknown.
        note: Where the times of the plan come from, such as "estimated for h100".
    """

    cuts: tuple[Name, ...]
    microbatch_rows: Positive
    num_replicas: Positive = 1
    num_layers: tuple[Positive, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        if self.num_layers and len(self.num_layers) != len(self.cuts) + 1:
            raise PlacementError(
                f"num_layers is {self.num_layers}; give one number for each of the {len(self.cuts) + 1} stages that "
                f"the cuts make"
            )

    @property
    def is_estimate(self) -> bool:
        """Whether nothing was measured: the plan's times were computed from what a device can do."""
        return self.note.startswith(ESTIMATED)

    @property
    def is_from_run(self) -> bool:
        """Whether the plan's times were measured in a run of its ranks, which `rota calibrate` put into it."""
        return self.note.startswith(_FROM_RUN)

    def measured_in(self, num_steps: int) -> Usage:
        """This usage for a plan with the times that a run of its ranks took, in so many recorded steps."""
        return replace(self, note=f"{_FROM_RUN}, in {count_text(num_steps, 'recorded step')}")

    @property
    def boundaries(self) -> tuple[int, ...] | None:
        """The stages' boundaries as in `rota.cutting`: 0, the first layer of each later stage, the number of layers."""
        return tuple(accumulate(self.num_layers, initial=0)) if self.num_layers else None

    def span_text(self, stage: int) -> str:
        """What a stage has of the model, by the names of the cuts: "all from layers.2 to before layers.5"."""
        begin = f"from {self.cuts[stage - 1]}" if stage else ""
        end = f"before {self.cuts[stage]}" if stage < len(self.cuts) else "on" if begin else ""
        return " ".join(filter(None, ("all", begin, "to" if begin and end != "on" else "", end)))


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
    def num_replicas(self) -> int:
        """How many pipelines run this plan together; 1 if the plan does not say."""
        return 1 if self.usage is None else self.usage.num_replicas

    @property
    def microbatch_rows(self) -> int | None:
        """The examples of the micro-batch that its times and bytes are for. None: unknown."""
        rows = self.placement.microbatch_rows
        return self.usage.microbatch_rows if rows is None and self.usage is not None else rows

    # --- the plan as a graph -------------------------------------------------------------------------------------
    # Nodes: the ops of task t are first_node[t], first_node[t] + 1, …, one per micro-batch of its data stream. After
    # all ops come two nodes, a reduction and an optimizer step, for each of `step_end_ranks`; then the transfers on
    # shared links, route after route: a node is the time for which a transfer occupies them.

    @cached_property
    def first_node(self) -> tuple[int, ...]:
        """The first node of each task, and as the last entry the number of ops."""
        return first_nodes(self.placement, self.num_microbatches)

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
        task = bisect_right(self.first_node, node) - 1
        stage, kind = self.placement.tasks[task].stage, self.placement.tasks[task].kind
        return Op(stage, kind, self.placement.microbatches(stage, self.num_microbatches)[node - self.first_node[task]])

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """`orders` as nodes. Raises PlanError unless each rank has exactly the ops that are placed on it."""
        return nodes_of(self.placement, self.num_microbatches, self.orders)

    @cached_property
    def variants(self) -> tuple[int, ...]:
        """For each op's node its task t and its micro-batch's class c as one number, t · num_classes + c."""
        num_classes, class_in, variants = self.placement.num_classes, self.placement.class_in, list[int]()
        for t in range(len(self.placement.tasks)):
            first, batches = t * num_classes, self.microbatches_of(t)
            variants += [first] * len(batches) if num_classes == 1 else [first + class_in(m) for m in batches]
        return tuple(variants)

    @cached_property
    def step_end_ranks(self) -> tuple[tuple[int, int], ...]:
        """(index into `placement.step_ends`, rank) of every reduction and optimizer step, in graph order.

        On each rank they are in the order of the stages' last gradients.
        """
        ends = self.placement.step_ends
        pairs = [(i, rank) for i, end in enumerate(ends) for rank in self.placement.gradient_ranks(end.stage)]
        return tuple(sorted(pairs, key=lambda pair: (pair[1], _last_gradient(self, ends[pair[0]].stage, pair[1]))))

    @cached_property
    def shared_transfers(self) -> SharedTransfers:
        """The transfers on shared links. Raises PlanError as `nodes` does."""
        if not any(route.shared for route in self.placement.routes):
            return SharedTransfers(self.placement, self.num_microbatches, self.num_ops)
        _ = self.nodes  # which refuses orders that are too few, and a num_microbatches that is too large
        return SharedTransfers(self.placement, self.num_microbatches, self.num_ops + 2 * len(self.step_end_ranks))

    @cached_property
    def served(self) -> tuple[tuple[int, ...], ...]:
        """For each shared link the nodes of its transfers in order of service. Raises PlanError for a wrong order."""
        if self.service_orders:
            return self.shared_transfers.nodes_of(self.service_orders)
        starts_us = self.earliest.starts_us
        return tuple(
            tuple(sorted(nodes, key=lambda node: (starts_us[node], node))) for nodes in self.shared_transfers.of_links
        )

    def duration_us(self, op: Op) -> int:
        """How long an op runs."""
        task = self.placement.tasks[self.placement.index[op[:2]]]
        return self.placement.value(task.duration_us, op.microbatch)

    def microbatches_on(self, route: int) -> range:
        """The micro-batches whose data travels on `placement.routes[route]`."""
        return self.placement.microbatches_on(route, self.num_microbatches)

    def microbatches_of(self, task: int) -> range:
        """The micro-batches of `placement.tasks[task]`, in the order of its nodes."""
        return self.placement.microbatches(self.placement.tasks[task].stage, self.num_microbatches)

    @cached_property
    def graph(self) -> TaskGraph:
        """Ops, step ends and transfers on shared links, and what each waits for. Raises PlanError as `nodes` does."""
        if not self.shared_transfers.first and not self.service_orders:
            return self._unserved_graph
        graph = self._unserved_graph
        edges, previous = [*graph.edges], [*graph.previous]
        _add_orders(self.served, edges, previous)
        return TaskGraph(graph.durations_us, edges, previous)

    @cached_property
    def _unserved_graph(self) -> TaskGraph:
        """The graph in which transfers do not wait for each other."""
        orders = self.nodes  # first: they refuse a num_microbatches that would make the graph too large for memory
        placement, first_node, class_of = self.placement, self.first_node, self.placement.class_of
        durations: list[int] = []
        edges: list[Edges] = []
        inputs = _task_inputs(placement, first_node, self.shared_transfers.first)
        for t, (task, sources, first) in enumerate(zip(placement.tasks, inputs, first_node, strict=False)):
            batches, classes = self.microbatches_of(t), range(placement.num_classes)
            durations += placement.column(task.duration_us, batches)
            of_class = [tuple((first - source, value_in(lag, c)) for source, lag in sources) for c in classes]
            edges += [of_class[class_of[m]] for m in batches] if class_of else of_class * len(batches)
        previous = [-1] * len(durations)
        _add_orders(orders, edges, previous)
        _add_step_ends(self, durations, edges)
        for r, first in self.shared_transfers.first.items():
            route, batches = placement.routes[r], self.microbatches_on(r)
            durations += placement.column(route.service_us, batches)
            edges += [((first - first_node[route.source], 0),)] * len(batches)
        previous += [-1] * (len(durations) - len(previous))
        return TaskGraph(durations, edges, previous)

    @cached_property
    def earliest(self) -> Earliest:
        """Earliest start and end of each node. Raises PlanError; for a cycle it names the waits."""
        try:
            if self.shared_transfers.first and not self.service_orders:
                routes = self.placement.routes
                servers = {
                    first + k: routes[r].shared
                    for r, first in self.shared_transfers.first.items()
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
        transfers = dict(self.shared_transfers.transfers())
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
        starts_on = [[starts[node] for node in nodes] for nodes in self.nodes] if self.shared_transfers.first else []
        for t, task in enumerate(self.placement.tasks):
            component, first = self.placement.component_of[t], self.first_node[t]
            for k in range(self.first_node[t + 1] - first):
                op, node = Op(task.stage, task.kind, k * num_components + component), first + k
                actions.append((starts[node], position[node], -1, -1, op))
                for i in outgoing[t]:
                    since, after, served = ends[node], float(position[node]), 0
                    if (
                        i in self.shared_transfers.first
                        and (served := starts[self.shared_transfers.first[i] + k]) > since
                    ):
                        sender = self.placement.routes[i].sender
                        running = self.nodes[sender][bisect_right(starts_on[sender], served) - 1]
                        if ends[running] > served:
                            since, after = starts[running], position[running] - 0.5
                        else:
                            since, after = served, position[running] + 0.5
                    actions.append((since, after, served, i, self.placement.transfer(i, op.microbatch)))
        return tuple(action for *_, action in sorted(actions, key=lambda entry: entry[:4]))

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """All transfers in the order in which they are sent."""
        return tuple(action for action in self.wire_order if isinstance(action, Transfer))

    # --- text and files -------------------------------------------------------------------------------------------

    def to_csv(self, *, communication: bool = False) -> str:
        """The plan as PyTorch's schedule CSV, such as "0F0,0B0"; see `rota.core.schedule_csv`.

        Args:
            communication: Include sends, receives and reductions.

        Raises:
            ScheduleError: The CSV cannot express the plan.
        """
        schedule_csv.require_chain(self.placement)
        return schedule_csv.write(self.orders, self.wire_order if communication else None)

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
            "service_orders": tuple(shared_links.to_texts(self.placement, self.service_orders)),
            "usage": self.usage,
            **placement_fields(self.placement),
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
            tuple(parse_ops(order.split(), f"{path}.orders[{i}], op")) for i, order in enumerate(file.orders)
        )
        plan = cls(read_placement(file, path), file.num_microbatches, orders, file.usage)
        plan._limit_transfers(path)
        rows = [
            shared_links.read(plan.placement, plan.num_microbatches, row, f"{path}.service_orders[{i}]")
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


def _task_inputs(
    placement: Placement, first_node: Sequence[int], first_service: Mapping[int, int]
) -> list[list[tuple[int, Amount]]]:
    """For each task the first nodes of its inputs, with the lags of the transfers."""
    lags: dict[tuple[int, int], Amount] = {(edge.source, edge.target): 0 for edge in placement.edges}
    sources: list[list[tuple[int, Amount]]] = [[] for _ in placement.tasks]
    for r, route in enumerate(placement.routes):
        if r in first_service:
            sources[route.target].append((first_service[r], by_class(sub, route.duration_us, route.service_us)))
            lags.pop((route.source, route.target), None)
    for r, route in enumerate(placement.routes):
        if r not in first_service:
            edge = route.source, route.target
            lags[edge] = by_class(max, lags.get(edge, 0), route.duration_us)
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


def _last_gradient(plan: Plan, stage: int, rank: int) -> int:
    """Position in the rank's order of the op that completes the stage's gradients; -1 if it makes none."""
    order = plan.orders[rank]
    last = (i for i in reversed(range(len(order))) if order[i].stage == stage and order[i].kind.makes_weight_gradients)
    return next(last, -1)


def _add_step_ends(plan: Plan, durations: list[int], edges: list[Edges]) -> None:
    """Append step ends: a rank's reductions in sequence, each after its stage's gradients, then its optimizer steps."""
    first: dict[int, int] = {}  # rank -> node of its first, and of its last reduction
    last: dict[int, int] = {}
    for j, (_, rank) in enumerate(plan.step_end_ranks):
        first.setdefault(rank, len(durations) + 2 * j)
        last[rank] = len(durations) + 2 * j
    for i, rank in plan.step_end_ranks:
        end, reduction = plan.placement.step_ends[i], len(durations)
        durations += [end.reduce_us, end.optimizer_us]
        gradient = _last_gradient(plan, end.stage, rank)
        to_reduce = [plan.nodes[rank][gradient]] if gradient >= 0 else []
        if reduction == first[rank]:
            to_optimize = [*plan.nodes[rank][-1:], last[rank]]
        else:
            to_reduce, to_optimize = [*to_reduce, reduction - 2], [reduction - 1]
        for node, inputs in ((reduction, to_reduce), (reduction + 1, to_optimize)):
            edges.append(tuple((node - before, 0) for before in inputs))
