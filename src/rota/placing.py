"""From costs and a cluster to a placement: stages on ranks, in the shapes that schedules are made for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rota.costs import Cluster, Costs
from rota.errors import PlacementError
from rota.placement import Edge, Placement, StepEnd
from rota.tasks import Kind, Task


def place(
    costs: Costs,
    cluster: Cluster,
    ranks: Sequence[int | Iterable[int]] | None = None,
    edges: Sequence[tuple[int, int]] | None = None,
) -> Placement:
    """Put stages on ranks: `ranks[i]` is stage i's rank or tuple of ranks (default: rank i).

    `edges` are (source, target) stages; default: the costs' own, else a chain. Every forward edge is mirrored by a
    backward one. Raises PlacementError.
    """
    num_stages = costs.num_stages
    if ranks is None:
        ranks = range(num_stages)
    if len(ranks) != num_stages:
        raise PlacementError(f"ranks has {len(ranks)} entries for {num_stages} stages; give one a stage")
    on = [(entry,) if isinstance(entry, int) else tuple(entry) for entry in ranks]
    if edges is None:
        edges = [(i, i + 1) for i in range(num_stages - 1)] if costs.edges is None else costs.edges
    for edge in edges:
        if not all(0 <= stage < num_stages for stage in edge) or len(edge) != 2:
            raise PlacementError(f"edge {edge} must join two of the stages 0 to {num_stages - 1}")
    tasks = _tasks(costs, on)
    static = [0] * cluster.num_ranks
    for stage, stage_ranks in enumerate(on):
        for rank in stage_ranks:
            if rank < len(static):  # a rank outside the cluster is told by Placement
                static[rank] += costs.static_bytes[stage]
    ends = zip(range(num_stages), costs.reduce_us, costs.optimizer_us, strict=True)
    step_ends = tuple(StepEnd(*end) for end in ends if any(end[1:]))
    return Placement(tuple(tasks), tuple(_edges(costs, edges)), cluster, tuple(static), step_ends)


def _tasks(costs: Costs, on: Sequence[tuple[int, ...]]) -> list[Task]:
    """F of all stages, then B (or I), then W: task i * num_stages + s is stage s's i-th kind."""
    stages = range(costs.num_stages)
    held = costs.activation_bytes
    peaks = costs.backward_peak_bytes
    tasks = [Task(s, Kind.F, on[s], costs.forward_us[s], held[s], costs.forward_peak_bytes[s]) for s in stages]
    if costs.weight_us is None:
        return tasks + [Task(s, Kind.B, on[s], costs.backward_us[s], -held[s], peaks[s]) for s in stages]
    freed = costs.freed_by_input
    tasks += [Task(s, Kind.I, on[s], costs.backward_us[s], -freed[s], peaks[s]) for s in stages]
    weight_us, peaks = costs.weight_us, costs.weight_peak_bytes
    return tasks + [Task(s, Kind.W, on[s], weight_us[s], freed[s] - held[s], peaks[s]) for s in stages]


def _edges(costs: Costs, edges: Sequence[tuple[int, int]]) -> list[Edge]:
    def sizes(name: str, value: tuple[int, ...] | int) -> tuple[int, ...]:
        if isinstance(value, int):
            return (value,) * len(edges)
        if len(value) != len(edges):
            raise PlacementError(
                f"{name} has {len(value)} entries, but there are {len(edges)} edges; give one an edge, "
                f"or one number for all"
            )
        return value

    n = costs.num_stages
    forward = sizes("boundary_bytes", costs.boundary_bytes)
    backward = forward if costs.gradient_bytes is None else sizes("gradient_bytes", costs.gradient_bytes)
    result = [Edge(a, b, size) for (a, b), size in zip(edges, forward, strict=True)]
    result += [Edge(n + b, n + a, size) for (a, b), size in zip(edges, backward, strict=True)]
    result += [Edge(s, n + s) for s in range(n)]
    if costs.weight_us is not None:
        result += [Edge(n + s, 2 * n + s) for s in range(n)]
    return result
