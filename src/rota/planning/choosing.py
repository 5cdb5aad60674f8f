"""Which of several plans to recommend: of those that are as fast as can be told apart, the simplest."""

from __future__ import annotations

from collections.abc import Iterable

from rota.planning.evaluation import SEARCHED, Found
from rota.schedules import FAMILIES

_PLACES = {family.name: place for place, family in enumerate(FAMILIES)}


def chosen(plans: Iterable[Found], tolerance: float) -> Found | None:
    """The simplest plan whose step is longer than the shortest by at most `tolerance` of it; None if there is none."""
    every = list(plans)
    shortest_us = min((found.step_us for found in every), default=0)
    alike = [found for found in every if found.step_us <= shortest_us * (1 + tolerance)]
    return min(alike, key=lambda found: (simplicity(found), found.key), default=None)


def simplicity(found: Found) -> tuple[int | bool, ...]:
    """The smaller, the simpler; first what costs a user most.

    Processes, copies of the model, stages that recompute, a searched order, a backward in two, stages per rank,
    micro-batches, and the schedule's place in the list of all.
    """
    layout = found.candidate.layout
    copies = layout.num_replicas * (2 if layout.shape == "bidirectional" else 1)
    return (
        layout.num_ranks * layout.num_replicas,
        copies,
        len(found.candidate.recomputed),
        found.schedule == SEARCHED,
        found.candidate.splits_backward,
        layout.stages_per_rank,
        layout.num_microbatches,
        _PLACES.get(found.schedule, len(_PLACES)),
    )
