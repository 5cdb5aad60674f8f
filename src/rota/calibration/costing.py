"""A placement -> the costs that it was made of, for other plans of the same stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rota.costs import Costs
from rota.errors import PlacementError
from rota.placement import Placement
from rota.placing import place
from rota.tasks import Kind, Task

_REMEDY = "only what rota.place makes of costs for training can be turned back into costs"


def costs_of(placement: Placement, note: str = "") -> Costs:
    """What `rota.place` has made this placement of. Raises PlacementError where it has not.

    Of several stages on one rank the placement knows the static bytes in all: they are dealt to them evenly.
    """
    stages = placement.stages
    if stages != tuple(range(len(stages))):
        raise PlacementError(f"the stages are {list(stages)}, not 0 to {len(stages) - 1}; {_REMEDY}")
    forward = [_task(placement, stage, Kind.F) for stage in stages]
    is_split = placement.task(0, Kind.B) is None
    backward = [_task(placement, stage, Kind.I if is_split else Kind.B) for stage in stages]
    weight = [_task(placement, stage, Kind.W) for stage in stages] if is_split else []
    again = [placement.task(stage, Kind.R) for stage in stages]
    held = [-task.held_bytes - (weight[s].held_bytes if is_split else 0) for s, task in enumerate(backward)]
    ends = {end.stage: end for end in placement.step_ends}
    edges, sizes, gradient_sizes = _edges(placement)
    costs = Costs(
        forward_us=tuple(task.duration_us for task in forward),
        backward_us=tuple(task.duration_us for task in backward),
        weight_us=tuple(task.duration_us for task in weight) if is_split else None,
        activation_bytes=tuple(held),
        input_frees_bytes=tuple(-task.held_bytes for task in backward) if is_split else None,
        boundary_bytes=sizes,
        gradient_bytes=gradient_sizes,
        forward_peak_bytes=tuple(task.peak_bytes for task in forward),
        backward_peak_bytes=tuple(task.peak_bytes for task in backward),
        weight_peak_bytes=tuple(task.peak_bytes for task in weight) or (0,) * len(stages),
        static_bytes=_static(placement),
        reduce_us=tuple(ends[stage].reduce_us if stage in ends else 0 for stage in stages),
        optimizer_us=tuple(ends[stage].optimizer_us if stage in ends else 0 for stage in stages),
        recompute_us=tuple(None if task is None else task.duration_us for task in again) if any(again) else None,
        checkpoint_bytes=tuple(0 if r is None else f.held_bytes for f, r in zip(forward, again, strict=True)),
        edges=edges,
        note=note,
        microbatch_rows=placement.microbatch_rows,
    )
    _refuse_unlike(placement, costs)
    return costs


def _task(placement: Placement, stage: int, kind: Kind) -> Task:
    task = placement.task(stage, kind)
    if task is None:
        raise PlacementError(f"stage {stage} has no {kind}; {_REMEDY}")
    return task


def _edges(placement: Placement) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...], tuple[int, ...]]:
    """Pairs of stages, and the bytes forward and back along each."""
    forward, back = [], []
    for source, target, size in placement.edges:
        a, b = placement.tasks[source], placement.tasks[target]
        if a.kind is b.kind is Kind.F:
            forward.append(((a.stage, b.stage), size))
        elif a.kind is b.kind and a.kind in (Kind.B, Kind.I):
            back.append(((b.stage, a.stage), size))
    pairs = tuple(pair for pair, _ in forward)
    if [pair for pair, _ in back] != [*pairs]:
        raise PlacementError(f"the backward's edges do not mirror the forward's; {_REMEDY}")
    return pairs, tuple(size for _, size in forward), tuple(size for _, size in back)


def _static(placement: Placement) -> tuple[int, ...]:
    """Each rank's to the stages that are on it alone, the first ones a byte more where it does not divide."""
    of_stage = dict.fromkeys(placement.stages, 0)
    for rank, size in enumerate(placement.static_bytes):
        alone = [stage for stage in placement.stages_on(rank) if placement.ranks_of(stage) == (rank,)]
        if size and not alone:
            raise PlacementError(f"rank {rank} has {size} static bytes and no stage of its own to have them; {_REMEDY}")
        for i, stage in enumerate(alone):
            of_stage[stage] = size // len(alone) + (i < size % len(alone))
    return tuple(of_stage.values())


def _refuse_unlike(placement: Placement, costs: Costs) -> None:
    again = place(costs, placement.cluster, [placement.ranks_of(stage) for stage in placement.stages])
    for name, mine, theirs in (("tasks", again.tasks, placement.tasks), ("edges", _named(again), _named(placement))):
        mine_counted: Counter[object] = Counter(mine)
        differing: Sequence[object] = [*(mine_counted - Counter(theirs)), *(Counter(theirs) - mine_counted)]
        if differing:
            raise PlacementError(f"{name} are not those of costs, such as {differing[0]}; {_REMEDY}")


def _named(placement: Placement) -> list[str]:
    tasks = placement.tasks
    return [f"{tasks[edge.source]} -> {tasks[edge.target]}, {edge.num_bytes} bytes" for edge in placement.edges]
