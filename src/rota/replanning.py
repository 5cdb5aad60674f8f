"""Plan the same stages for another number of ranks, to resume training after ranks were lost or added.

4 ranks, one stage each      0 | 1 | 2 | 3
2 ranks                      0   1 | 2   3        cuts and names of weights stay, so checkpoints still fit
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from rota.checking import check
from rota.cluster import SharedLink, of_at_most
from rota.cutting import balanced
from rota.errors import PlacementError, PlanError
from rota.placement import Placement
from rota.plan import Plan
from rota.schedules.families import named_plans
from rota.schedules.ready_first import ready_first
from rota.simulation import simulate


def replan(plan: Plan, num_ranks: int) -> Plan:
    """Plan the same stages for another number of ranks.

    Neighbouring stages share a rank. They are divided so that the ranks' times are balanced; if that does not fit in
    memory, so that their static bytes are, then the bytes that their ops hold. Ranks are assumed equal: the lowest
    limit applies to each, and a rank's static bytes are divided evenly among its stages. The result depends only on the
    arguments, so processes that call it with the same arguments get the same plan.

    Args:
        plan: The old plan.
        num_ranks: The new number of ranks.

    Returns:
        The fastest plan found; `plan` itself if it is for `num_ranks` ranks.

    Raises:
        PlacementError: There are fewer stages than ranks, or a stage is on several ranks.
        PlanError: No plan fits in memory.
    """
    if num_ranks == plan.num_ranks:
        return plan
    components = _components(plan.placement)
    _require_movable(plan, components, num_ranks)
    refused: PlanError | None = None
    for ranks in _rank_choices(plan.placement, components, num_ranks):
        placement = _moved(plan.placement, ranks, num_ranks)
        try:
            found = _fastest_that_fits(placement, plan.num_microbatches)
        except PlanError as error:
            refused = refused or error
            continue
        return replace(plan, placement=placement, orders=found.orders, service_orders=())
    assert refused is not None  # every placement has a plan
    raise PlanError(
        f"the plan's {plan.num_stages} stages do not fit on {num_ranks} ranks: {refused}; or start more ranks",
        refused.reason,
    )


def _components(placement: Placement) -> list[list[int]]:
    """The stages of each data stream."""
    components: list[list[int]] = [[] for _ in range(placement.num_components)]
    for stage in placement.stages:
        components[placement.microbatches(stage, placement.num_components)[0]].append(stage)
    return components


def _require_movable(plan: Plan, components: Sequence[Sequence[int]], num_ranks: int) -> None:
    if num_ranks < 1:
        raise PlacementError(f"num_ranks is {num_ranks}: a plan needs at least 1 rank")
    for task in plan.placement.tasks:
        if len(task.ranks) > 1:
            raise PlacementError(
                f"stage {task.stage} is on the ranks {', '.join(map(str, task.ranks))} together, and its module is "
                f"made for these: it cannot be moved to {num_ranks} ranks; start {plan.num_ranks}, or plan again"
            )
    least = min(map(len, components))
    if num_ranks > least:
        raise PlacementError(
            f"{least} stages cannot be placed on {num_ranks} ranks; start at most {least} ranks (or replicas of "
            f"them, with dp), or cut the model into {num_ranks} stages and plan again"
        )


def _rank_choices(
    placement: Placement, components: Sequence[Sequence[int]], num_ranks: int
) -> Iterator[dict[int, int]]:
    """Ways to put stages on ranks, the preferred one first; data streams go down and up the ranks alternately."""
    times_us, kept = dict.fromkeys(placement.stages, 0), dict.fromkeys(placement.stages, 0)
    for task in placement.average.tasks:
        times_us[task.stage] += task.duration_us
        kept[task.stage] += max(task.held_bytes, 0) + task.peak_bytes
    seen: list[dict[int, int]] = []
    for weights in (times_us, _per_stage(placement, placement.static_bytes), kept):
        ranks: dict[int, int] = {}
        for i, stages in enumerate(components):
            # At least 1 each, so that every rank has a stage: without one its optimizer would have no parameters.
            boundaries = balanced([max(weights[stage], 1) for stage in stages], num_ranks)
            for rank, (start, end) in enumerate(pairwise(boundaries)):
                ranks |= dict.fromkeys(stages[start:end], rank if i % 2 == 0 else num_ranks - 1 - rank)
        if ranks not in seen:
            seen.append(ranks)
            yield ranks


def _per_stage(placement: Placement, of_ranks: Sequence[int]) -> dict[int, int]:
    """Bytes of each stage: an even share of its rank's, rounded up; a placement has static bytes per rank only."""
    return {
        stage: -(-num_bytes // len(stages))
        for rank, num_bytes in enumerate(of_ranks)
        for stages in [placement.stages_on(rank)]
        for stage in stages
    }


def _moved(placement: Placement, ranks: dict[int, int], num_ranks: int) -> Placement:
    """The placement with stage s on `ranks[s]`."""
    limits = [limit for limit in placement.cluster.limit_bytes if limit is not None]
    old = placement.cluster
    links = tuple(link for link in old.links if max(link[:2]) < num_ranks)
    shared = tuple(left for link in old.shared for left in _among(link, num_ranks))
    cluster = replace(
        old,
        limit_bytes=(min(limits, default=None),) * num_ranks,
        links=links,
        shared=shared,
        all_reduces=of_at_most(old.all_reduces, num_ranks),
    )

    def moved(of_ranks: Sequence[int]) -> tuple[int, ...]:
        held = [0] * num_ranks
        for stage, size in _per_stage(placement, of_ranks).items():
            held[ranks[stage]] += size
        return tuple(held)

    return replace(
        placement,
        tasks=tuple(replace(task, ranks=(ranks[task.stage],)) for task in placement.tasks),
        cluster=cluster,
        static_bytes=moved(placement.static_bytes),
        state_bytes=moved(placement.state_bytes),
        snapshot_bytes=moved(placement.snapshot_bytes),
    )


def _among(link: SharedLink, num_ranks: int) -> Iterator[SharedLink]:
    """The shared link without the ranks from `num_ranks` on; nothing if no senders or no receivers are left."""
    senders, receivers = (tuple(rank for rank in side if rank < num_ranks) for side in (link.senders, link.receivers))
    if senders and receivers:
        yield replace(link, senders=senders, receivers=receivers)


def _fastest_that_fits(placement: Placement, num_microbatches: int) -> Plan:
    """The fastest of the 1F1B-like plans and named schedules that `check` accepts.

    Raises:
        PlanError: None is accepted; it says what the first one lacks.
    """
    best: tuple[int, Plan] | None = None
    refused: PlanError | None = None
    for candidate in _candidates(placement, num_microbatches):
        try:
            check(candidate)
        except PlanError as error:
            refused = refused or error
            continue
        makespan_us = simulate(candidate).makespan_us
        if best is None or makespan_us < best[0]:
            best = makespan_us, candidate
    if best is None:
        assert refused is not None  # ready_first plans any placement
        raise refused
    return best[1]


def _candidates(placement: Placement, num_microbatches: int) -> Iterator[Plan]:
    """1F1B-like plans, from most forwards ahead to fewest, then every named schedule that is defined here."""
    for forwards_per_hop in (2, 1, 0):
        yield ready_first(placement, num_microbatches, forwards_per_hop)
    yield from (plan for _, plan in named_plans(placement, num_microbatches, lambda _: None))
