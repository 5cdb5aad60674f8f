"""The inverse of `rota.place`: from a placement to its costs, for other plans of the same stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rota.core.costs import Costs
from rota.core.errors import PlacementError
from rota.core.placement import Placement
from rota.core.placing import place
from rota.core.tasks import Kind, Task, scalar

_REMEDY = "only placements that rota.place made for training can be turned back into costs"


def costs_of(placement: Placement, note: str = "") -> Costs:
    """The costs from which `rota.place` made a placement.

    Args:
        placement: A placement of stages 0, 1, … that `rota.place` made.
        note: The note of the returned costs: the origin of the numbers.

    Returns:
        Costs that `rota.place` turns into the same tasks and edges. Static bytes are known per rank only: they are
        divided evenly among the stages that are on that rank only.

    Raises:
        PlacementError: The placement is not one that `rota.place` makes for training.
    """
    placement.require_alike("costs_of")
    stages = placement.stages
    if stages != tuple(range(len(stages))):
        raise PlacementError(f"the stages are {list(stages)}, not 0 to {len(stages) - 1}; {_REMEDY}")
    forward = [_task(placement, stage, Kind.F) for stage in stages]
    is_split = placement.task(0, Kind.B) is None
    backward = [_task(placement, stage, Kind.I if is_split else Kind.B) for stage in stages]
    weight = [_task(placement, stage, Kind.W) for stage in stages] if is_split else []
    again = [placement.task(stage, Kind.R) for stage in stages]
    loads = [placement.task(stage, Kind.L) for stage in stages]
    freed = _column(backward, "held_bytes")
    kept_for_weight = _column(weight, "held_bytes") or (0,) * len(stages)
    ends = {end.stage: end for end in placement.step_ends}
    edges, sizes, gradient_sizes = _edges(placement)
    costs = Costs(
        forward_us=_column(forward, "duration_us"),
        backward_us=_column(backward, "duration_us"),
        weight_us=_column(weight, "duration_us") if is_split else None,
        activation_bytes=tuple(-a - b for a, b in zip(freed, kept_for_weight, strict=True)),
        input_frees_bytes=tuple(-size for size in freed) if is_split else None,
        boundary_bytes=sizes,
        gradient_bytes=gradient_sizes,
        forward_peak_bytes=_column(forward, "peak_bytes"),
        backward_peak_bytes=_column(backward, "peak_bytes"),
        weight_peak_bytes=_column(weight, "peak_bytes"),
        static_bytes=_per_stage(placement, "static_bytes"),
        state_bytes=_per_stage(placement, "state_bytes"),
        snapshot_bytes=_per_stage(placement, "snapshot_bytes"),
        reduce_us=tuple(ends[stage].reduce_us if stage in ends else 0 for stage in stages),
        optimizer_us=tuple(ends[stage].optimizer_us if stage in ends else 0 for stage in stages),
        recompute_us=tuple(None if task is None else scalar(task.duration_us) for task in again)
        if any(again)
        else None,
        checkpoint_bytes=tuple(0 if r is None else scalar(f.held_bytes) for f, r in zip(forward, again, strict=True)),
        offload_bytes=tuple(0 if task is None else scalar(task.held_bytes) for task in loads),
        edges=edges,
        note=note,
        microbatch_rows=placement.microbatch_rows,
    )
    _require_same(placement, costs)
    return costs


def _task(placement: Placement, stage: int, kind: Kind) -> Task:
    task = placement.task(stage, kind)
    if task is None:
        raise PlacementError(f"stage {stage} has no {kind}; {_REMEDY}")
    return task


def _column(tasks: Sequence[Task], name: str) -> tuple[int, ...]:
    return tuple(scalar(getattr(task, name)) for task in tasks)


def _edges(placement: Placement) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...], tuple[int, ...]]:
    """Pairs of stages, and the bytes forward and backward along each."""
    forward, back = [], []
    for source, target, num_bytes in placement.edges:
        size = scalar(num_bytes)
        a, b = placement.tasks[source], placement.tasks[target]
        if a.kind is b.kind is Kind.F:
            forward.append(((a.stage, b.stage), size))
        elif a.kind is b.kind and a.kind in (Kind.B, Kind.I):
            back.append(((b.stage, a.stage), size))
    pairs = tuple(pair for pair, _ in forward)
    if [pair for pair, _ in back] != [*pairs]:
        raise PlacementError(f"the backward's edges do not mirror the forward's; {_REMEDY}")
    return pairs, tuple(size for _, size in forward), tuple(size for _, size in back)


def _per_stage(placement: Placement, name: str) -> tuple[int, ...]:
    """Such bytes per stage: a rank's bytes divided among the stages on it only; the first get the remainder."""
    of_stage = dict.fromkeys(placement.stages, 0)
    for rank, size in enumerate(getattr(placement, name)):
        stages = [stage for stage in placement.stages_on(rank) if placement.ranks_of(stage) == (rank,)]
        if size and not stages:
            raise PlacementError(f"rank {rank} has {size} {name.replace('_', ' ')}, but no stage of its own; {_REMEDY}")
        for i, stage in enumerate(stages):
            of_stage[stage] = size // len(stages) + (i < size % len(stages))
    return tuple(of_stage.values())


def _require_same(placement: Placement, costs: Costs) -> None:
    """Raise PlacementError unless `rota.place` turns the costs back into the placement."""
    again = place(costs, placement.cluster, [placement.ranks_of(stage) for stage in placement.stages])
    for name, nouns in (("tasks", (again.tasks, placement.tasks)), ("edges", map(_edge_names, (again, placement)))):
        placed, expected = map(Counter[object], nouns)
        if differing := [*(placed - expected), *(expected - placed)]:
            raise PlacementError(f"{name} differ from what rota.place makes, such as {differing[0]}; {_REMEDY}")


def _edge_names(placement: Placement) -> list[str]:
    tasks = placement.tasks
    return [f"{tasks[edge.source]} -> {tasks[edge.target]}, {edge.num_bytes} bytes" for edge in placement.edges]
