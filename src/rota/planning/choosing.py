"""Which of several plans to recommend: of those that are as fast as can be told apart, the simplest."""

from __future__ import annotations

from collections.abc import Iterable

from rota.planning.evaluation import SEARCHED, Found
from rota.planning.step_times import FAR, difference
from rota.schedules import FAMILIES

#: Of a step: a spread above which rounds of steps do not tell which plan is faster.
NOISY = 0.10

_PLACES = {family.name: place for place, family in enumerate(FAMILIES)}


def chosen(plans: Iterable[Found], tolerance: float) -> Found | None:
    """The simplest of the plans that are as fast as the fastest; None if there are none.

    Plans are as fast if their steps differ by at most `tolerance` of a step, or, where steps of both were run, by at
    most what `spread_between` says: a plan is only passed over for a less simple one that the rounds show to be faster.
    """
    every = list(plans)
    fastest = min(every, key=lambda found: found.key, default=None)
    alike = [found for found in every if fastest is not None and _is_as_fast(found, fastest, tolerance)]
    return min(alike, key=lambda found: (simplicity(found), found.key), default=None)


def spread_between(found: Found, fastest: Found, tolerance: float) -> float:
    """The part of a step by which two plans may differ and count as equal: at least `tolerance`."""
    if found.steps is None or fastest.steps is None:
        return tolerance
    return max(difference(found.steps, fastest.steps).spread, tolerance)


def _is_as_fast(found: Found, fastest: Found, tolerance: float) -> bool:
    if found is fastest:
        return True
    if found.steps is None or fastest.steps is None:
        return found.step_us <= fastest.step_us * (1 + tolerance)
    slower = difference(found.steps, fastest.steps).times - 1
    return slower <= min(spread_between(found, fastest, tolerance), FAR - 1)


def simplicity(found: Found) -> tuple[int | bool, ...]:
    """The smaller, the simpler; first what costs a user most.

    Processes; then what each of them does: stages that recompute, a searched order, a backward in two, stages per
    rank. Only between plans that are alike in all of this, fewer copies of the model are simpler: replicas of a plain
    plan are easier to understand and to run than one pipeline that interleaves stages. Then micro-batches, and the
    schedule's place in the list of all.
    """
    layout = found.candidate.layout
    directions = 2 if layout.shape == "bidirectional" else 1  # each rank has a stage of each direction's copy
    return (
        layout.num_ranks * layout.num_replicas,
        len(found.candidate.recomputed),
        found.schedule == SEARCHED,
        found.candidate.splits_backward,
        directions * layout.stages_per_rank,
        directions * layout.num_replicas,
        layout.num_microbatches,
        _PLACES.get(found.schedule, len(_PLACES)),
    )
