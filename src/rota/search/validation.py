"""Checks of the arguments of a search: each function raises SearchError with the value and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from rota.core.errors import SearchError
from rota.core.placement import Placement
from rota.core.tasks import scalar

_TOO_LARGE = 1 << 53  # of µs and bytes: numbers up to here are exact in floats, and their sums fit into 64 bits
_MOST_OPS = 10_000_000  # these need a few GB of memory
_MOST_PER_PERIOD = 64
_MOST_DIFFERING_OPS = 2_500  # their longest paths, between all pairs, need 50 MB


def refuse_wrong(placement: Placement, num_microbatches: int, objective: str, objectives: Sequence[str]) -> None:
    """Refuse what cannot be searched. Raises SearchError."""
    _refuse_no_placement(placement)
    if objective not in objectives:
        raise SearchError(f"objective is {objective!r}: use one of {', '.join(objectives)}")
    _refuse_no_whole("num_microbatches", num_microbatches, None, "a step needs at least 1, a whole number")
    if not placement.is_alike:
        _refuse_differing(placement, num_microbatches, objective)
    for sizes in placement.classes:
        refuse_too_large(sizes, num_microbatches)


def _refuse_differing(placement: Placement, num_microbatches: int, objective: str) -> None:
    """Refuse what cannot be searched where micro-batches differ."""
    if objective == "period":
        refuse_differing(placement)
    if num_microbatches != placement.given_microbatches:
        raise SearchError(
            f"num_microbatches is {num_microbatches}, but the placement has the sizes of "
            f"{placement.given_microbatches} micro-batches; give as many"
        )
    tasks = len(placement.tasks) * -(-num_microbatches // placement.num_components)
    if tasks > _MOST_DIFFERING_OPS:
        raise SearchError(
            f"a step of {tasks:,} ops of micro-batches that differ is too large to search; use fewer micro-batches, "
            f"for at most {_MOST_DIFFERING_OPS:,} ops, or plan placement.average and check its orders"
        )


def refuse_wrong_curve(placement: Placement, microbatches_per_period: int | None) -> None:
    """Refuse what has no curve of memory against period. Raises SearchError."""
    _refuse_no_placement(placement)
    if microbatches_per_period is not None:
        remedy = f"give a whole number from 1 to {_MOST_PER_PERIOD}, or None for one and more"
        _refuse_no_whole("microbatches_per_period", microbatches_per_period, _MOST_PER_PERIOD, remedy)
    refuse_differing(placement)
    refuse_too_large(placement, _MOST_PER_PERIOD * placement.num_components)


def refuse_differing(placement: Placement) -> None:
    """Refuse micro-batches that differ. Raises SearchError."""
    if not placement.is_alike:
        raise SearchError(
            "micro-batches that differ have no steady state; give placement.average, or one class of them"
        )


def refuse_wrong_progress(progress: object) -> None:
    """Refuse an invalid `progress`. Raises SearchError."""
    if progress is not None and not callable(progress):
        raise SearchError(f"progress is {_short(progress)}; give a function, such as print, or None")


def seconds_of(time_limit_s: float) -> float:
    """The time limit, in seconds. Raises SearchError unless it is a number above 0."""
    is_number = isinstance(time_limit_s, (int, float)) and not isinstance(time_limit_s, bool)
    if not is_number or not time_limit_s > 0:
        raise SearchError(f"time_limit_s is {_short(time_limit_s)}; give the search more than 0 seconds, as a number")
    return time_limit_s


def refuse_too_large(placement: Placement, num_microbatches: int) -> None:
    """Refuse too many ops, and times or sizes whose sums could overflow. Raises SearchError."""
    served = sum(bool(route.shared) for route in placement.routes)
    ops = (len(placement.tasks) + served) * -(-num_microbatches // placement.num_components)
    if ops > _MOST_OPS:
        raise SearchError(
            f"num_microbatches is {num_microbatches}: a step of {ops:,} ops is too large to search; use fewer "
            f"micro-batches, for at most {_MOST_OPS:,} ops"
        )
    ranks = range(placement.num_ranks)
    ends_us = sum(end.reduce_us + end.optimizer_us for end in placement.step_ends) * len(ranks)
    path_us = sum(scalar(task.duration_us) for task in placement.tasks)
    path_us += sum(scalar(route.duration_us) for route in placement.routes)
    if (most_us := path_us * num_microbatches + ends_us) >= _TOO_LARGE:
        raise SearchError(
            f"durations are too large to search: {len(ranks)} ranks x {num_microbatches} micro-batches could take up "
            f"to {Decimal(most_us):.1e} µs, {Decimal(_TOO_LARGE):.1e} or more; use a coarser unit"
        )
    sizes = [0 for _ in ranks]  # of a micro-batch, on each rank
    for task in placement.tasks:
        for rank in task.ranks:
            sizes[rank] += abs(scalar(task.held_bytes)) + scalar(task.peak_bytes)
    for route in placement.routes:
        sizes[route.sender] += scalar(route.num_bytes)
        sizes[route.receiver] += scalar(route.num_bytes)
    for rank, (size, static) in enumerate(zip(sizes, placement.static_bytes, strict=True)):
        if (most := size * num_microbatches + static) >= _TOO_LARGE:
            raise SearchError(
                f"sizes are too large to search: {num_microbatches} micro-batches on rank {rank} could take and free "
                f"up to {Decimal(most):.1e} bytes, {Decimal(_TOO_LARGE):.1e} or more; use a coarser unit"
            )
        limit = placement.cluster.limit_bytes[rank]
        if limit is not None and limit >= _TOO_LARGE:
            raise SearchError(
                f"the limit of rank {rank} is too large to search: {Decimal(limit):.1e} bytes, "
                f"{Decimal(_TOO_LARGE):.1e} or more; leave it out, or use a coarser unit"
            )


def _refuse_no_placement(placement: object) -> None:
    if not isinstance(placement, Placement):
        raise SearchError(
            f"placement is of type {type(placement).__name__}, no Placement; give one, such as what rota.place makes "
            "of costs and a cluster, or a plan's .placement"
        )


def _refuse_no_whole(name: str, value: object, most: int | None, remedy: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most is not None and value > most):
        raise SearchError(f"{name} is {_short(value)}; {remedy}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
