"""Why nothing fits, and what would."""

from __future__ import annotations

from rota.errors import SearchError
from rota.placement import Placement
from rota.search.bounds.memory_bounds import Need, least_memory
from rota.search.problem import Problem
from rota.units import size_text


def refuse_too_little_memory(problem: Problem) -> None:
    """Raises SearchError where a rank's limit is below what every plan needs."""
    placement = problem.placement
    limits = placement.cluster.limit_bytes
    short = []
    for need, limit in zip(least_memory(problem), limits, strict=True):
        if limit is not None and need.num_bytes > limit:
            short.append(need)
    if not short:
        return
    first, *others = short
    infeasible = f"{_describe_need(placement, first)}, over its limit of {limits[first.rank]}"
    raised = "the limit to that"
    if others:
        ranks = ", ".join(f"rank {need.rank} ({need.num_bytes} bytes)" for need in others)
        infeasible += f"; also {ranks}"
        raised = f"the limits to these, or all to {max(need.num_bytes for need in short)}"
    remedies = ["give such ranks fewer layers" if others else "give the rank fewer layers"]
    remedies.append("free what is left behind" if _is_left_behind(placement, first) else "make micro-batches smaller")
    raise SearchError(f"{infeasible}; raise {raised}, {remedies[0]}, or {remedies[1]}")


def _describe_need(placement: Placement, need: Need) -> str:
    static = placement.static_bytes[need.rank]
    what = "parameters, gradients and optimizer alone"
    if need.task >= 0:
        what = f"{placement.tasks[need.task]} of a single micro-batch"
    elif _is_left_behind(placement, need):
        what = f"what its micro-batches leave behind: {need.num_bytes - static} bytes that no op frees"
    return (
        f"rank {need.rank} needs at least {need.num_bytes} bytes ({size_text(need.num_bytes)}; {size_text(static)} of "
        f"them static) for {what}"
    )


def _is_left_behind(placement: Placement, need: Need) -> bool:
    """Whether the largest need is for bytes that nothing frees."""
    return need.task < 0 and need.num_bytes > placement.static_bytes[need.rank]


def nothing_found(placement: Placement, held_bytes: list[int], elapsed_s: float, has_tried_all: bool) -> SearchError:
    """The error for a search that ended without a plan, though less memory than `held_bytes` might be enough.

    Args:
        placement: What was searched.
        held_bytes: [num_ranks]: what each rank holds with one micro-batch at a time.
        elapsed_s: How long the search lasted.
        has_tried_all: Whether it is proven that no order fits in which each task does its micro-batches in order.
    """
    limits = placement.cluster.limit_bytes
    over = {
        rank: held
        for rank, (held, limit) in enumerate(zip(held_bytes, limits, strict=True))
        if limit is not None and held > limit
    }
    raised = ", ".join(f"of rank {rank} to {held} bytes ({size_text(held)})" for rank, held in over.items())
    found = "found no order that fits" if not has_tried_all else "no order with each task's micro-batches in turn fits"
    longer = "" if has_tried_all else "give the search more time, "
    return SearchError(
        f"{found}, in {elapsed_s:.1f} s: {longer}raise the limit {raised}, in which one micro-batch at a time fits, or "
        f"make micro-batches smaller"
    )
