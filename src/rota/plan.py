"""A plan: for each rank its ops in execution order, and the order of the transfers that follows from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, repeat
from typing import Any, NamedTuple

from rota import notebook, reading, schedule_csv
from rota.errors import PlanError
from rota.placement import Placement
from rota.taskgraph import CycleError, Earliest, TaskGraph
from rota.tasks import Op
from rota.units import count_text
from rota.usage import Usage

_MAX_CYCLE_WAITS = 12  # waits of a cycle in an error message
_MAX_TRANSFERS = 10_000_000  # in a plan from a file


class Transfer(NamedTuple):
    """The transfer of the output of op `source` from rank `sender` to rank `receiver`, where op `target` reads it."""

    source: Op
    target: Op
    sender: int
    receiver: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.source}→{self.target}"


@dataclass(frozen=True)
class Plan:
    """What each rank runs, in order. The constructor checks nothing; see `rota.check`.

    Attributes:
        placement: Tasks, edges, ranks and links.
        num_microbatches: Number of micro-batches of a step, over all data streams.
        orders: For each rank its ops, first to last.
        usage: Cuts, micro-batch size and replicas, if they were decided together with the plan.
    """

    placement: Placement
    num_microbatches: int
    orders: tuple[tuple[Op, ...], ...]
    usage: Usage | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "orders", tuple(tuple(order) for order in self.orders))

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
    # all ops come two nodes, a reduction and an optimizer step, for each of `step_end_ranks`.

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
        return nodes

    def _nodes_on(self, rank: int) -> tuple[int, ...]:
        num_components = self.placement.num_components
        here = {
            (task.stage, task.kind): (self.first_node[i], self.placement.component_of[i])
            for i, task in enumerate(self.placement.tasks)
            if rank in task.ranks
        }
        nodes = []
        for op in self.orders[rank]:
            stage, kind, microbatch = op
            known = here.get((stage, kind))
            if known is None or microbatch % num_components != known[1] or not 0 <= microbatch < self.num_microbatches:
                raise self._misplaced(op, rank)
            nodes.append(known[0] + microbatch // num_components)
        return tuple(nodes)

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
    def graph(self) -> TaskGraph:
        """Ops and step ends, and what each of them waits for. Raises PlanError as `nodes` does."""
        orders = (
            self.nodes
        )  # first, because it refuses a num_microbatches that would make the graph too large for memory
        ends = [(self.placement.step_ends[i].stage, rank) for i, rank in self.step_end_ranks]
        last = [self._last_gradient(*end) for end in ends]
        gradients = [orders[rank][k] if k >= 0 else None for k, (_, rank) in zip(last, ends, strict=True)]
        return _graph_of(self.placement, self.first_node, orders, self.step_end_ranks, gradients)

    @cached_property
    def earliest(self) -> Earliest:
        """Earliest start and end of each node. Raises PlanError; for a cycle it names the waits."""
        try:
            return self.graph.earliest()
        except CycleError as error:
            raise PlanError(self._describe_cycle(error.nodes), "cycle") from None

    def _describe_cycle(self, nodes: list[int]) -> str:
        data = {(edge.source, edge.target) for edge in self.placement.edges}
        waits = list(zip(nodes, nodes[1:] + nodes[:1], strict=True))
        half, more = _MAX_CYCLE_WAITS // 2, len(waits) - _MAX_CYCLE_WAITS
        lines: list[str] = []
        for node, before in waits if more <= 0 else waits[:half] + waits[-half:]:
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

    # --- transfers ------------------------------------------------------------------------------------------------

    @cached_property
    def wire_order(self) -> tuple[Op | Transfer, ...]:
        """All ops and transfers in one global order, in which every rank starts them.

        The order is by simulated start; ties are broken by dependencies, so each action comes after all that it needs.
        Sequential processes that all follow one global order cannot deadlock: the first action that is not done has
        nothing left to wait for. This holds even if a send waits for its receive, and if each pair of ranks is one
        ordered channel. Raises PlanError as `earliest` does.
        """
        earliest = self.earliest
        actions: list[tuple[int, int, int, Op | Transfer]] = []
        position = {node: i for i, node in enumerate(earliest.sequence)}
        num_components = self.placement.num_components
        outgoing: list[list[int]] = [[] for _ in self.placement.tasks]
        for i, route in enumerate(self.placement.routes):
            outgoing[route.source].append(i)
        for t, task in enumerate(self.placement.tasks):
            component, first = self.placement.component_of[t], self.first_node[t]
            for k in range(self.first_node[t + 1] - first):
                op, node = Op(task.stage, task.kind, k * num_components + component), first + k
                actions.append((earliest.starts_us[node], position[node], -1, op))
                for i in outgoing[t]:
                    route = self.placement.routes[i]
                    target = self.placement.tasks[route.target]
                    reader = Op(target.stage, target.kind, op.microbatch)
                    transfer = Transfer(op, reader, route.sender, route.receiver, route.num_bytes)
                    actions.append((earliest.ends_us[node], position[node], i, transfer))
        return tuple(action for *_, action in sorted(actions, key=lambda entry: entry[:3]))

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """All transfers in the order in which they are sent."""
        return tuple(action for action in self.wire_order if isinstance(action, Transfer))

    # --- text and notebooks -------------------------------------------------------------------------------------------

    def to_csv(self, *, communication: bool = False, overlap: bool = False) -> str:
        """The plan as PyTorch's schedule CSV, such as "0F0,0B0"; see `rota.schedule_csv`.

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
        return reading.dump("plan", self.to_fields())

    def to_fields(self) -> dict[str, Any]:
        """The fields of a plan in JSON."""
        orders = [" ".join(map(str, order)) for order in self.orders]
        usage = {} if self.usage is None else {"usage": self.usage.to_fields()}
        return {"num_microbatches": self.num_microbatches, "orders": orders, **self.placement.to_fields(), **usage}

    def _repr_html_(self) -> str:
        """A picture of the simulated plan, or why it cannot run."""
        try:
            starts, ends = self.earliest.starts_us, self.earliest.ends_us
        except PlanError as error:
            return notebook.document(notebook.heading("Plan", ["cannot run"]), notebook.preformatted(str(error)))
        columns = [[[times[node] for node in nodes] for nodes in self.nodes] for times in (starts, ends)]
        last = max(ends, default=0)
        facts = [count_text(self.num_ranks, "rank"), count_text(self.num_microbatches, "micro-batch", "es")]
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
        orders = [schedule_csv.parse_ops(order.text().split(), f"{order.path}, op") for order in document["orders"]]
        usage = Usage.from_fields(document["usage"]) if "usage" in document else None
        plan = cls(Placement.from_fields(document), document["num_microbatches"].integer(1), tuple(orders), usage)
        plan._limit_transfers(document)
        return plan

    def _limit_transfers(self, document: reading.Field) -> None:
        """Raise FormatError if few bytes in a file make too many transfers: one per micro-batch and reader's rank."""
        rounds = min(self.num_microbatches, max(map(len, self.orders), default=0))  # further ones lack their ops
        tasks = self.placement.tasks
        num_transfers = sum(len(tasks[edge.target].ranks) for edge in self.placement.edges) * max(rounds, 1)
        if num_transfers > _MAX_TRANSFERS:
            raise document["edges"].wrong(f"at most {_MAX_TRANSFERS:,} transfers, not {num_transfers:,}")


# --- building the graph -----------------------------------------------------------------------------------------------

_Inputs = list[tuple[tuple[int, int], ...]]


def _graph_of(
    placement: Placement,
    first_node: Sequence[int],
    orders: Sequence[Sequence[int]],
    step_end_ranks: Sequence[tuple[int, int]],
    gradients: Sequence[int | None],
) -> TaskGraph:
    """`Plan.graph`. `gradients[j]` is the node, if any, that completes the gradients of `step_end_ranks[j]`."""
    durations: list[int] = []
    inputs: _Inputs = []
    previous, further = _order_edges(orders, first_node[-1])
    for task, edges, (first, after) in zip(
        placement.tasks, _task_inputs(placement, first_node), pairwise(first_node), strict=True
    ):
        durations += [task.duration_us] * (after - first)
        columns = [zip(range(source, source + after - first), repeat(lag)) for source, lag in edges]
        inputs += zip(*columns, zip(previous[first:after], repeat(0)), strict=True)
    for node, before in enumerate(previous):
        if before < 0:
            inputs[node] = inputs[node][:-1]
    for before, node in further:
        inputs[node] += ((before, 0),)
    _add_step_ends(placement, orders, step_end_ranks, gradients, durations, inputs)
    return TaskGraph(durations, inputs)


def _task_inputs(placement: Placement, first_node: Sequence[int]) -> list[list[tuple[int, int]]]:
    """For each task the first nodes of its inputs, with the lags of the transfers."""
    lags: dict[tuple[int, int], int] = {(edge.source, edge.target): 0 for edge in placement.edges}
    for route in placement.routes:
        lags[route.source, route.target] = max(lags[route.source, route.target], route.duration_us)
    sources: list[list[tuple[int, int]]] = [[] for _ in placement.tasks]
    for (source, target), lag in lags.items():
        sources[target].append((first_node[source], lag))
    return sources


def _order_edges(orders: Sequence[Sequence[int]], num_ops: int) -> tuple[list[int], list[tuple[int, int]]]:
    """For each op its predecessor on one of its ranks (-1: none), and (predecessor, node) for its other ranks."""
    previous = [-1] * num_ops
    further = []
    for nodes in orders:
        for before, node in pairwise(nodes):
            if previous[node] < 0:
                previous[node] = before
            else:
                further.append((before, node))
    return previous, further


def _add_step_ends(
    placement: Placement,
    orders: Sequence[Sequence[int]],
    step_end_ranks: Sequence[tuple[int, int]],
    gradients: Sequence[int | None],
    durations: list[int],
    inputs: _Inputs,
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
        inputs += (tuple((node, 0) for node in before) for before in (to_reduce, to_optimize))
