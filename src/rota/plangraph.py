"""The waits of a plan as a graph: data, transfers, each rank's order, and the step's ends."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, repeat

from rota.placement import Placement
from rota.taskgraph import TaskGraph

Inputs = list[tuple[tuple[int, int], ...]]


def graph_of(
    placement: Placement,
    first_node: Sequence[int],
    orders: Sequence[Sequence[int]],
    step_end_ranks: Sequence[tuple[int, int]],
    gradients: Sequence[int | None],
) -> TaskGraph:
    """`Plan.graph`: for each task its ops from `first_node` on, then a reduction and an optimizer step a step end.

    `orders[rank]` are nodes; `gradients[j]` the node, if any, that makes the last ones of `step_end_ranks[j]`.
    """
    durations: list[int] = []
    inputs: Inputs = []
    previous, further = _order_edges(orders, first_node[-1])
    for task, edges, (first, after) in zip(
        placement.tasks, _data(placement, first_node), pairwise(first_node), strict=True
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


def _data(placement: Placement, first_node: Sequence[int]) -> list[list[tuple[int, int]]]:
    """For each task the first nodes of what it reads, with the lags of the transfers."""
    lags: dict[tuple[int, int], int] = {(edge.source, edge.target): 0 for edge in placement.edges}
    for route in placement.routes:
        lags[route.source, route.target] = max(lags[route.source, route.target], route.duration_us)
    sources: list[list[tuple[int, int]]] = [[] for _ in placement.tasks]
    for (source, target), lag in lags.items():
        sources[target].append((first_node[source], lag))
    return sources


def _order_edges(orders: Sequence[Sequence[int]], num_ops: int) -> tuple[list[int], list[tuple[int, int]]]:
    """For each op's node the one before it on a rank (-1: none), and (before, node) for a task's further ranks."""
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
    inputs: Inputs,
) -> None:
    """A rank's reductions follow each other, each behind its stage's gradients; its optimizer steps come last."""
    first: dict[int, int] = {}  # reduction by rank
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
