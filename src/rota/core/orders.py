"""The orders of ranks as nodes of a plan's graph; orders that lack ops or have others are refused.

The ops of task t are the nodes first[t], first[t] + 1, …, one per micro-batch of its data stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise, repeat

from rota.core.errors import PlanError
from rota.core.placement import Placement
from rota.core.tasks import Kind, Op

Orders = Sequence[Sequence[Op]]


def first_nodes(placement: Placement, num_microbatches: int) -> tuple[int, ...]:
    """The first node of each task, and as the last entry the number of ops."""
    counts = (len(placement.microbatches(task.stage, num_microbatches)) for task in placement.tasks)
    return tuple(accumulate(counts, initial=0))


def nodes_of(placement: Placement, num_microbatches: int, orders: Orders) -> tuple[tuple[int, ...], ...]:
    """Orders as nodes. Raises PlanError unless each rank has exactly the ops that are placed on it."""
    if num_microbatches < 1:
        raise PlanError(f"num_microbatches is {num_microbatches}; a step needs at least 1", "missing")
    expected = placement.given_microbatches
    if expected not in (None, num_microbatches):
        raise PlanError(
            f"num_microbatches is {num_microbatches}, but the placement has the sizes of {expected} micro-batches; "
            f"give as many",
            "unknown",
        )
    if len(orders) != placement.num_ranks:
        raise PlanError(
            f"the plan has {len(orders)} rank orders, but its placement has {placement.num_ranks} ranks; "
            f"give one order per rank, an empty one for a rank without ops",
            "unknown",
        )
    step = _Step(placement, num_microbatches)
    nodes = tuple(step.nodes_on(rank, order) for rank, order in enumerate(orders))
    # Only now, because an op on the wrong rank is also missing on the right one.
    for rank, order in enumerate(orders):
        step.require_complete(rank, order, nodes[rank])
    if placement.sample_of:
        _require_chunks_in_order(placement, orders)
    return nodes


class _Step:
    """All ops of a step."""

    def __init__(self, placement: Placement, num_microbatches: int) -> None:
        self._placement, self._num_microbatches = placement, num_microbatches
        self._first = first_nodes(placement, num_microbatches)
        self._tasks_on: list[list[int]] = [[] for _ in range(placement.num_ranks)]
        for t, task in enumerate(placement.tasks):
            for rank in task.ranks:
                self._tasks_on[rank].append(t)

    def _microbatches(self, stage: int) -> range:
        return self._placement.microbatches(stage, self._num_microbatches)

    def _num_ops(self, rank: int) -> int:
        return sum(self._first[t + 1] - self._first[t] for t in self._tasks_on[rank])

    def nodes_on(self, rank: int, order: Sequence[Op]) -> tuple[int, ...]:
        tasks = self._placement.tasks
        if self._num_ops(rank) != len(order):
            # Not complete. A file may claim more micro-batches than fit in memory, so only the ops it has are listed.
            return tuple(self._node(op, rank) for op in order)
        node_of: dict[tuple[int, Kind, int], int] = {}
        for t in self._tasks_on[rank]:
            ops = zip(repeat(tasks[t].stage), repeat(tasks[t].kind), self._microbatches(tasks[t].stage))
            node_of.update(zip(ops, range(self._first[t], self._first[t + 1]), strict=True))
        try:
            return tuple(map(node_of.__getitem__, order))
        except KeyError:
            raise self._misplaced(next(op for op in order if op not in node_of), rank) from None

    def _node(self, op: Op, rank: int) -> int:
        t = self._placement.index.get(op[:2])
        if t is None or t not in self._tasks_on[rank] or op.microbatch not in self._microbatches(op.stage):
            raise self._misplaced(op, rank)
        return self._first[t] + self._microbatches(op.stage).index(op.microbatch)

    def _misplaced(self, op: Op, rank: int) -> PlanError:
        does, placement = f"rank {rank} does {op}", self._placement
        task = placement.task(op.stage, op.kind)
        if task is None:
            kinds = sorted(task.kind for task in placement.tasks if task.stage == op.stage)
            has = f"stage {op.stage} has {' '.join(kinds)}" if kinds else f"there are {placement.num_stages} stages"
            return PlanError(f"{does}, which the placement does not know ({has})", "unknown")
        batches = self._microbatches(op.stage)
        if op.microbatch not in batches:
            numbers = f"{batches[0]} to {batches[-1]}" if batches else "none"
            step = f" in steps of {batches.step}" if batches.step > 1 else ""
            return PlanError(f"{does}, but stage {op.stage} has the micro-batches {numbers}{step}", "unknown")
        ranks = ", ".join(map(str, task.ranks))
        return PlanError(f"{does}, but stage {op.stage} is on rank {ranks}; move it there", "wrong rank")

    def require_complete(self, rank: int, order: Sequence[Op], nodes: Sequence[int]) -> None:
        if len(set(nodes)) != len(nodes):
            twice = next(op for op, count in Counter(order).items() if count > 1)
            raise PlanError(f"rank {rank} does {twice} twice; remove one of them", "duplicate")
        num_missing = self._num_ops(rank) - len(nodes)
        if num_missing:
            planned = set(order)
            tasks = (self._placement.tasks[t] for t in self._tasks_on[rank])
            every = (Op(task.stage, task.kind, m) for task in tasks for m in self._microbatches(task.stage))
            first = next(op for op in every if op not in planned)
            more = f" and {num_missing - 1} more" if num_missing > 1 else ""
            raise PlanError(f"rank {rank} never does {first}{more}; add it there, or lower num_microbatches", "missing")


def _require_chunks_in_order(placement: Placement, orders: Orders) -> None:
    """Refuse a rank that runs chunks of a sample in another order than forwards first to last, backwards back."""
    chunk_before = {m: before for row in placement.chunks for before, m in pairwise(row)}
    chunk_after = {before: m for m, before in chunk_before.items()}
    for rank, order in enumerate(orders):
        done: set[Op] = set()
        for op in order:
            needs = chunk_before if op.kind is Kind.F else chunk_after if op.kind in (Kind.B, Kind.I) else {}
            if op.microbatch in needs and (first := op._replace(microbatch=needs[op.microbatch])) not in done:
                raise PlanError(
                    f"rank {rank} does {op} before {first}, {'an earlier' if op.kind is Kind.F else 'a later'} chunk "
                    f"of the same sample; do chunks forward in order and backward in reverse",
                    "chunks",
                )
            done.add(op)
