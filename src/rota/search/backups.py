"""Backup plans for the loss of each single rank, searched for, with a proven bound for each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import ceil

from rota.backups import Backup, Backups, Place, as_backup, backup_placements, plan_backup
from rota.checking import check
from rota.errors import SearchError
from rota.plan import Plan
from rota.search.bounds import bounds_of
from rota.search.finding import find_plan
from rota.search.result import Progress
from rota.simulation import simulate


def find_backups(
    plan: Plan,
    num_replicas: int,
    *,
    time_limit_s: float = 10.0,
    deterministic: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Backups:
    """Make a backup plan for each rank of a plan: its peers in the other replicas run its micro-batches.

    Each is the better of the plans of `plan_backup` and `find_plan`, with split backwards where the plan's are whole. A
    rank for which list scheduling already reaches the bound is not searched for.

    Args:
        plan: The plan of each replica.
        num_replicas: Number of replicas, 2 or more.
        time_limit_s: How long to search, in seconds, for all ranks together.
        deterministic: As for `find_plan`.
        progress: As for `find_plan`.

    Returns:
        The plans, checked, each with a lower bound for all plans of its ranks.

    Raises:
        PlacementError: Another rank cannot stand in for a lost one.
        PlanError: Without some rank no plan fits in memory.
        SearchError: An argument is invalid.
    """
    check(plan)
    found = []
    for rank in range(plan.num_ranks):
        share_s = time_limit_s / plan.num_ranks
        found.append(_find(plan, num_replicas, rank, share_s, deterministic, progress))
    return Backups(plan, num_replicas, tuple(found))


def _find(
    plan: Plan,
    num_replicas: int,
    rank: int,
    time_limit_s: float,
    deterministic: bool,
    progress: Callable[[Progress], None] | None,
) -> Backup:
    lost = [Place(0, rank)]
    num_microbatches = plan.num_microbatches * num_replicas
    best = plan_backup(plan, num_replicas, lost)
    makespan_us = simulate(best).makespan_us
    placements = backup_placements(plan, num_replicas, lost)
    bounds_us = [bounds_of(placement, num_microbatches)[0].us for placement in placements]
    if makespan_us > min(bounds_us):
        with suppress(SearchError):  # nothing that fits was found in that time
            result = find_plan(
                placements[0],
                num_microbatches,
                time_limit_s=time_limit_s,
                deterministic=deterministic,
                progress=progress,
            )
            bounds_us[0] = max(bounds_us[0], ceil(result.bound_us))
            if result.timeline.makespan_us < makespan_us:
                best = as_backup(result.plan, plan, num_replicas)
                makespan_us = result.timeline.makespan_us
    return Backup(rank, best, makespan_us, min(bounds_us))
