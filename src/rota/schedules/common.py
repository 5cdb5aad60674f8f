"""What several families need to know of a placement."""

from __future__ import annotations

from rota.errors import ScheduleError
from rota.placement import Placement
from rota.tasks import Kind, Op

BACKWARD_KINDS = (Kind.R, Kind.B, Kind.I, Kind.W)


def depth(placement: Placement) -> dict[int, int]:
    """For each stage the number of edges on its longest way forward to a last stage."""
    after: dict[int, list[int]] = {stage: [] for stage in placement.stages}
    for source, target in placement.stage_edges:
        after[source].append(target)
    depths: dict[int, int] = {}
    pending = list(placement.stages)
    while pending:
        stage = pending[-1]
        missing = [target for target in after[stage] if target not in depths]
        if missing:
            pending += missing
        else:
            depths[stage] = max((depths[target] + 1 for target in after[stage]), default=0)
            pending.pop()
    return depths


def backward_ops(placement: Placement, stage: int, microbatch: int) -> list[Op]:
    """What follows a forward: B, or I and W."""
    return [Op(stage, kind, microbatch) for kind in BACKWARD_KINDS if (stage, kind) in placement.index]


def require_microbatches(name: str, num_microbatches: int) -> None:
    if num_microbatches < 1:
        raise ScheduleError(f"{name}: num_microbatches is {num_microbatches}; give 1 or more")
