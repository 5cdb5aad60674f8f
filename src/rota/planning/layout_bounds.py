"""Lower bounds on a step's time and memory that hold for every order of its ops.

They are proofs: a layout that they rule out cannot be faster, or cannot fit. The bound on time is a rank's wait for its
first input, plus all its work, plus the time after that. They are fast, for thousands of layouts; docs/bounds.md has
far sharper ones for a single placement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rota.core.layers import LayerCosts
from rota.core.placement import Placement
from rota.core.taskgraph import TaskGraph
from rota.core.tasks import Kind, scalar
from rota.planning.layouts import Layout
from rota.planning.request import Request

_ROUNDING = 1 - 1e-9  # sums of floats may be off by so much


def layout_bound_us(request: Request, layout: Layout) -> int:
    """A lower bound on a step of this layout, wherever the model is cut and whatever the order of its ops."""
    layers = request.profiles[layout.rows]
    slowdowns = request.machine.slowdowns_of(layout.num_ranks, layout.num_replicas)
    fastest, copies = min(slowdowns), 2 if layout.has_copies else 1
    work = _work_us(layers, layout)
    whole = layout.num_microbatches * sum(work) + copies * sum(layers.optimizer_us)
    speeds = sorted((1 / slowdown for slowdown in slowdowns), reverse=True)
    # Ranks begin with different layers; the faster wait longer, at best.
    heads = sorted(_longest_heads(layers) * copies)
    waits = fastest * sum(head * speed for head, speed in zip(heads, reversed(speeds), strict=False))
    reduced = speeds[-1] * _reduced_us(request, layout, layers)
    a_layer = layout.num_microbatches * max(work) * fastest / copies
    return int(max((whole + waits + reduced) / sum(speeds), a_layer) * _ROUNDING)


def _work_us(layers: LayerCosts, layout: Layout) -> list[int]:
    """A lower bound on each layer's work per micro-batch, with its backward whole or split."""
    columns = layers.forward_us, layers.backward_us, layers.input_us, layers.weight_us
    work = [f + min(b, i + w) for f, b, i, w in zip(*columns, strict=True)]
    # Every stage has a layer, so at least this many come before the last stage.
    num_recomputed = {"none": 0, "all": layers.num_layers}.get(layout.recompute, layout.num_stages - 1)
    return [us + (layers.recompute_us[i] if i < num_recomputed else 0) for i, us in enumerate(work)]


def _longest_heads(layers: LayerCosts) -> list[int]:
    """For each layer the longest chain of forwards before it."""
    ways = [0] * layers.num_layers
    for source, target in sorted(layers.edges):
        ways[target] = max(ways[target], ways[source] + layers.forward_us[source])
    return ways


def _reduced_us(request: Request, layout: Layout, layers: LayerCosts) -> float:
    """The time after the ranks' last ops, summed over ranks: all reductions, if each rank has one stage.

    0 where sums were measured: several small ones may take less than a large one, or more.
    """
    machine, n, replicas = request.machine, layout.num_ranks, layout.num_replicas
    if layout.shape != "chain" or replicas == 1 or machine.all_reduces:
        return 0.0
    rings = (machine.ring(machine.holders(n, replicas, rank)) for rank in range(n))
    rates = [link.bytes_per_us for link in rings]
    if None in rates:
        return 0.0
    return 2 * (replicas - 1) / replicas * sum(layers.gradient_bytes) / max(rate for rate in rates if rate)


def placement_bound_us(placement: Placement, num_microbatches: int) -> int:
    """A lower bound on every order of this placement's ops."""
    lags = [(edge.source, edge.target, 0) for edge in placement.edges]
    lags += [(route.source, route.target, scalar(route.duration_us)) for route in placement.routes]
    heads, tails = _longest_paths(placement, lags), _longest_paths(placement, [(b, a, lag) for a, b, lag in lags])
    ends = {end.stage: (end.reduce_us, end.optimizer_us) for end in placement.step_ends}
    counts = {s: len(placement.microbatches(s, num_microbatches)) for s in placement.stages}
    reduction = [
        ends[task.stage][0] if task.stage in ends and task.kind.makes_weight_gradients else 0
        for task in placement.tasks
    ]
    # Of several data streams, some have no micro-batch in a very short step.
    tasks = [t for t, task in enumerate(placement.tasks) if counts[task.stage]]
    longest = max(heads[t] + scalar(placement.tasks[t].duration_us) + tails[t] for t in tasks)
    for rank in range(placement.num_ranks):
        on_rank = {t for t in tasks if rank in placement.tasks[t].ranks}
        if on_rank:
            optimizers = sum(us for s, (_, us) in ends.items() if rank in placement.gradient_ranks(s))
            work = sum(counts[placement.tasks[t].stage] * scalar(placement.tasks[t].duration_us) for t in on_rank)
            # After its last op come the reduction of that op's stage and then all optimizer steps.
            # A task for which another one of the rank waits is not its last.
            inside = {edge.source for edge in placement.edges if {edge.source, edge.target} <= on_rank}
            last = min(max(tails[t], reduction[t] + optimizers) for t in on_rank - inside)
            longest = max(longest, min(heads[t] for t in on_rank) + work + last)
    return longest


def _longest_paths(placement: Placement, lags: Sequence[tuple[int, int, int]]) -> list[int]:
    """For each task the longest path to its start."""
    inputs: list[list[tuple[int, int]]] = [[] for _ in placement.tasks]
    for source, target, lag in lags:
        inputs[target].append((source, lag))
    return TaskGraph.of([scalar(task.duration_us) for task in placement.tasks], inputs).earliest().starts_us


def least_bytes(*placements: Placement) -> list[int]:
    """For each rank a lower bound on the bytes that it holds, whatever the order: those of one micro-batch, alone.

    With several placements of the same stages, each stage may be as in any of them. When a stage's backward begins, the
    forwards before it have run, and hold what they keep.
    """
    first = placements[0]
    before: dict[int, set[int]] = {stage: set() for stage in first.stages}
    for source, target in sorted(first.stage_edges):
        before[target] |= {source} | before[source]
    on = {task.stage: task.ranks for task in first.tasks}
    held = [{(t.stage, t.kind): max(scalar(t.held_bytes), 0) for t in placement.tasks} for placement in placements]
    kept = {stage: min(task_bytes[stage, Kind.F] for task_bytes in held) for stage in first.stages}
    earlier = {stage: sum(kept[b] for b in before[stage] if on[b] == on[stage]) for stage in first.stages}
    alone = [_alone(placement, task_bytes, earlier) for placement, task_bytes in zip(placements, held, strict=True)]
    least = list(first.static_bytes)
    for stage, ranks in on.items():
        for rank in ranks:
            least[rank] = max(least[rank], first.static_bytes[rank] + min(stage_bytes[stage] for stage_bytes in alone))
    return least


def _alone(placement: Placement, held: Mapping[tuple[int, Kind], int], earlier: Mapping[int, int]) -> dict[int, int]:
    """For each stage the most that its tasks hold, one after another, on top of what `earlier` stages keep."""
    most = dict.fromkeys(placement.stages, 0)
    for task in placement.tasks:
        alive = scalar(task.peak_bytes)
        if task.kind is not Kind.W:  # which the backwards of the stages before it need not wait for
            alive += earlier[task.stage] + held[task.stage, Kind.F]
            alive += held.get((task.stage, Kind.R), 0) if task.kind is not Kind.F else 0
        most[task.stage] = max(most[task.stage], alive)
    return most
