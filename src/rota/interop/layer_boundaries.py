"""Shared by the layouts of other trainers: boundaries between layers, the costs between them, and orders."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rota import cutting
from rota.core.costs import Costs
from rota.core.errors import PlacementError, ScheduleError, SplitError
from rota.core.plan import Plan
from rota.schedules import NAMED

MOST_LAYERS = 10_000  # limit for a layout's layers, and for its stages


def require_boundaries(boundaries: Sequence[int], num_stages: int | None = None) -> tuple[int, ...]:
    """Boundaries as in `rota.cutting`: 0, the start of each further part, the number of layers. Raises SplitError."""
    cut = tuple(boundaries)
    text = f"boundaries {_short(cut)}"
    if len(cut) < 2 or cut[0] != 0 or cut[-1] < 1:
        raise SplitError(f"{text} must begin with 0 and end with the number of layers, such as 0,4,8")
    if cut[-1] > MOST_LAYERS or len(cut) > MOST_LAYERS:
        raise SplitError(f"{text} have {max(cut[-1], len(cut)):,} layers or stages; {MOST_LAYERS:,} at most")
    for entry, (before, after) in enumerate(pairwise(cut), 1):
        if after < before:
            raise SplitError(f"{text} fall from {before} to {after} at entry {entry}; sort them")
    if num_stages is not None and len(cut) - 1 != num_stages:
        raise SplitError(f"{text} make {len(cut) - 1} parts for {num_stages} stages; give {num_stages + 1} entries")
    return cut


def stage_costs(costs: Costs, boundaries: Sequence[int]) -> Costs:
    """The costs of a cut's stages: `costs` itself if it is for stages, merged if it is for layers.

    Raises PlacementError if it is for neither, or if a stage without layers has nothing to merge.
    """
    num_layers, num_stages = boundaries[-1], len(boundaries) - 1
    if costs.num_stages == num_stages:
        return costs
    if costs.num_stages != num_layers:
        raise PlacementError(
            f"the costs have {costs.num_stages} entries, but the cut has {num_layers} layers in {num_stages} stages; "
            f"give costs of the layers, or of the stages"
        )
    for stage, (before, after) in enumerate(pairwise(boundaries)):
        if before == after:
            raise PlacementError(
                f"stage {stage} has no layer, so it has no cost among those of layers; give costs of stages"
            )
    return cutting.merge(costs, boundaries)


def has_order_of(schedule: str, plan: Plan) -> bool:
    """Whether the plan has each rank's ops in the order of a named schedule."""
    try:
        return NAMED[schedule](plan.placement, plan.num_microbatches).orders == plan.orders
    except ScheduleError:
        return False


def _short(numbers: Sequence[int]) -> str:
    text = ",".join(map(str, numbers[:12]))
    return f"{text},… ({len(numbers)} entries)" if len(numbers) > 12 else text or "(none)"
