"""Why nothing fits, and what would."""

from __future__ import annotations

from rota.errors import SearchError
from rota.placement import Placement
from rota.search.holding import Need, least_memory
from rota.search.problem import Problem
from rota.units import size_text


def refuse_too_little_memory(problem: Problem) -> None:
    """Raises SearchError where a rank's limit is below what every plan needs."""
    placement = problem.placement
    for need, limit in zip(least_memory(problem), placement.cluster.limit_bytes, strict=True):
        if limit is not None and need.num_bytes > limit:
            raise SearchError(_tell_need(placement, need, limit))


def _tell_need(placement: Placement, need: Need, limit: int) -> str:
    static = placement.static_bytes[need.rank]
    what = "parameters, gradients and optimizer alone"
    if need.task >= 0:
        what = f"{placement.tasks[need.task]} of a single micro-batch"
    return (
        f"rank {need.rank} needs at least {need.num_bytes} bytes ({size_text(need.num_bytes)}; {size_text(static)} of "
        f"them static) for {what}, over its limit of {limit}; raise the limit to that, give the rank fewer layers, or "
        f"make micro-batches smaller"
    )


def nothing_found(placement: Placement, held_bytes: list[int]) -> SearchError:
    """`held_bytes`: what each rank holds with one micro-batch at a time."""
    limits = placement.cluster.limit_bytes
    over = [0 if limit is None else peak - limit for peak, limit in zip(held_bytes, limits, strict=True)]
    rank = over.index(max(over))
    return SearchError(
        f"found no order that fits: with one micro-batch at a time rank {rank} still holds {held_bytes[rank]} bytes "
        f"({size_text(held_bytes[rank])}), over its limit of {limits[rank]}; raise the limit to that, or make "
        f"micro-batches smaller"
    )
