"""From costs and a cluster to a placement: a chain, interleaved, wave, bidirectional, or any DAG of stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.errors import PlacementError
from rota.core.placement import Placement
from rota.core.tasks import Edge, Kind, StepEnd, Task


def place(
    costs: Costs,
    cluster: Cluster,
    ranks: Sequence[int | Iterable[int]] | None = None,
    edges: Sequence[tuple[int, ...]] | None = None,
) -> Placement:
    """Put stages on ranks. Every forward edge is mirrored by a backward edge.

    Args:
        costs: Time and memory of each stage.
        cluster: The ranks and links.
        ranks: For each stage its rank, or the ranks that run it together. Default: stage i on rank i.
        edges: (source, target) stages, or `stages.edges`. Default: the edges of `costs`, else a chain.

    Returns:
        The placement, whose tasks are listed kind by kind: F, B (or I), W, R, O, L.

    Raises:
        PlacementError: A stage is not on the cluster, or edges do not fit the stages or the costs.
    """
    num_stages = costs.num_stages
    if ranks is None:
        ranks = range(num_stages)
    if len(ranks) != num_stages:
        raise PlacementError(f"ranks has {len(ranks)} entries for {num_stages} stages; give one per stage")
    ranks_of = [(entry,) if isinstance(entry, int) else tuple(entry) for entry in ranks]
    if edges is None:
        edges = [(i, i + 1) for i in range(num_stages - 1)] if costs.edges is None else costs.edges
    pairs = [(edge[0], edge[1]) for edge in edges]  # the edges of Stages also have a key
    for pair in pairs:
        if not all(0 <= stage < num_stages for stage in pair):
            raise PlacementError(f"edge {pair} must join two of the stages 0 to {num_stages - 1}")
    tasks = _tasks(costs, ranks_of)

    def per_rank(of_stages: tuple[int, ...]) -> tuple[int, ...]:
        held = [0] * cluster.num_ranks
        for stage, stage_ranks in enumerate(ranks_of):
            for rank in stage_ranks:
                if rank < len(held):  # Placement refuses a rank outside the cluster
                    held[rank] += of_stages[stage]
        return tuple(held)

    ends = zip(range(num_stages), costs.reduce_us, costs.optimizer_us, strict=True)
    step_ends = tuple(StepEnd(*end) for end in ends if any(end[1:]))
    between = tuple(_edges(costs, tasks, pairs))
    return Placement(
        tuple(tasks),
        between,
        cluster,
        per_rank(costs.static_bytes),
        step_ends,
        costs.microbatch_rows,
        state_bytes=per_rank(costs.state_bytes),
        snapshot_bytes=per_rank(costs.snapshot_bytes),
    )


def _tasks(costs: Costs, ranks_of: Sequence[tuple[int, ...]]) -> list[Task]:
    """All stages' tasks, kind by kind: F, B (or I), W, R, O, L."""
    stages = range(costs.num_stages)
    held, freed, kept = costs.activation_bytes, costs.freed_by_input, costs.kept_bytes
    peaks = costs.backward_peak_bytes
    tasks = [Task(s, Kind.F, ranks_of[s], costs.forward_us[s], kept[s], costs.forward_peak_bytes[s]) for s in stages]
    if costs.weight_us is None:
        tasks += [Task(s, Kind.B, ranks_of[s], costs.backward_us[s], -held[s], peaks[s]) for s in stages]
    else:
        tasks += [Task(s, Kind.I, ranks_of[s], costs.backward_us[s], -freed[s], peaks[s]) for s in stages]
        weight_us, peaks = costs.weight_us, costs.weight_peak_bytes
        tasks += [Task(s, Kind.W, ranks_of[s], weight_us[s], freed[s] - held[s], peaks[s]) for s in stages]
    peaks = costs.forward_peak_bytes
    again = ((s, us) for s, us in enumerate(costs.recompute_us or ()) if us is not None)
    tasks += [Task(s, Kind.R, ranks_of[s], us, held[s] - kept[s], peaks[s]) for s, us in again]
    copied = [(s, num_bytes) for s, num_bytes in enumerate(costs.offload_bytes) if num_bytes]
    tasks += [Task(s, Kind.O, ranks_of[s], 0, -num_bytes) for s, num_bytes in copied]
    return tasks + [Task(s, Kind.L, ranks_of[s], 0, num_bytes) for s, num_bytes in copied]


def _edges(costs: Costs, tasks: Sequence[Task], edges: Sequence[tuple[int, int]]) -> list[Edge]:
    """Edges for activations, for gradients in the other direction, and F (R) B, or F (R) I W, within each stage.

    What is offloaded goes from F to O by one copy, and from L to the backward by another.
    """

    def sizes(name: str, value: tuple[int, ...] | int) -> tuple[int, ...]:
        if isinstance(value, int):
            return (value,) * len(edges)
        if len(value) != len(edges):
            raise PlacementError(
                f"{name} has {len(value)} entries, but there are {len(edges)} edges; give one per edge, "
                f"or one number for all"
            )
        return value

    forward = sizes("boundary_bytes", costs.boundary_bytes)
    backward = forward if costs.gradient_bytes is None else sizes("gradient_bytes", costs.gradient_bytes)
    index = {(task.stage, task.kind): i for i, task in enumerate(tasks)}
    back = Kind.B if costs.weight_us is None else Kind.I
    result = [Edge(index[a, Kind.F], index[b, Kind.F], size) for (a, b), size in zip(edges, forward, strict=True)]
    result += [Edge(index[b, back], index[a, back], size) for (a, b), size in zip(edges, backward, strict=True)]
    for s in range(costs.num_stages):
        order = [index[s, kind] for kind in (Kind.F, Kind.R, back, Kind.W) if (s, kind) in index]
        result += [Edge(before, after) for before, after in pairwise(order)]
        if num_bytes := costs.offload_bytes[s]:
            offload, load = index[s, Kind.O], index[s, Kind.L]
            result += [Edge(index[s, Kind.F], offload, num_bytes), Edge(offload, load)]
            result += [Edge(load, index[s, back], num_bytes)]
    return result


def interleaved(costs: Costs, cluster: Cluster) -> Placement:
    """A chain placed round robin: stage i on rank i mod num_ranks (Megatron's virtual stages).

    Args:
        costs: Costs of a chain whose number of stages is a multiple of the number of ranks.
        cluster: The ranks and links.

    Raises:
        PlacementError: The costs are not of such a chain.
    """
    _require_whole_rounds("interleaved", costs, cluster, 1)
    return place(costs, cluster, [stage % cluster.num_ranks for stage in range(costs.num_stages)])


def wave(costs: Costs, cluster: Cluster) -> Placement:
    """A chain that goes down the ranks and back up, repeatedly: 0 1 2 2 1 0 0 1 2 … (V with two stages per rank).

    Args:
        costs: Costs of a chain whose number of stages is a multiple of twice the number of ranks.
        cluster: The ranks and links.

    Raises:
        PlacementError: The costs are not of such a chain.
    """
    _require_whole_rounds("wave", costs, cluster, 2)
    n = cluster.num_ranks
    down_and_up = [*range(n), *reversed(range(n))]
    return place(costs, cluster, [down_and_up[stage % (2 * n)] for stage in range(costs.num_stages)])


def bidirectional(costs: Costs, cluster: Cluster) -> Placement:
    """Two chains with the same weights in opposite directions (X).

    On n ranks, stage s of the first chain is on rank s; its copy in the second chain, stage n + s, is on rank
    n - 1 - s. So each rank has two stages. The chains run the micro-batches alternately.

    Args:
        costs: Costs of one chain with one stage per rank.
        cluster: The ranks and links.

    Raises:
        PlacementError: The costs are not of such a chain.
    """
    n = cluster.num_ranks
    if costs.num_stages != n:
        raise PlacementError(f"bidirectional needs a chain of {n} stages for {n} ranks, not {costs.num_stages} stages")
    chain = [(s, s + 1) for s in range(n - 1)]
    both = costs.as_chain().repeated(2, chain + [(n + a, n + b) for a, b in chain])
    return place(both, cluster, [*range(n), *reversed(range(n))])


def _require_whole_rounds(name: str, costs: Costs, cluster: Cluster, directions: int) -> None:
    costs.as_chain()  # raises if it is not a chain
    step = directions * cluster.num_ranks
    if costs.num_stages % step:
        near = max(costs.num_stages // step, 1) * step
        raise PlacementError(
            f"{name} on {cluster.num_ranks} ranks needs a chain of a multiple of {step} stages, not "
            f"{costs.num_stages}; split the model into {near} or {near + step}"
        )
