"""Plans of batches by rules alone, without a compiled loop: for the time until the loops of the search are compiled.

Samples of similar lengths share a micro-batch, up to a budget of tokens; a named schedule orders them in a valley.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from rota.batching.bounds import ALL_ORDERS, of_grouping
from rota.batching.figures import Layout, Place
from rota.batching.grouping import Grouper
from rota.batching.policies import valley
from rota.batching.replicas import of_share, shares_of
from rota.batching.result import BatchPlan
from rota.core.checking import check
from rota.core.cluster import Cluster
from rota.core.errors import RotaError
from rota.core.simulation import simulate
from rota.core.sizes import SizeModel
from rota.schedules import NAMED

_MICROBATCHES_PER_RANK = (8, 16, 32, inf)  # the first that fits in memory is taken; in the end, a sample each
#: The first that is defined for the placement and fits in memory is taken.
_SCHEDULES = ("zb_h1", "1f1b", "interleaved_1f1b", "zb_v", "v_min", "gpipe")


def plan_replicas_by_name(
    model: SizeModel, cluster: Cluster, lengths: Sequence[int], num_replicas: int, *, packed: bool, place: Place
) -> tuple[BatchPlan, ...] | None:
    """As `plan_replicas`, by rules; None if no named schedule fits in memory. Raises SearchError as that does."""
    layout = Layout.of(model, cluster, place)
    Grouper(layout, lengths, packed)  # refuses a sample that fits nowhere by its index in the whole batch
    plans = []
    for share in shares_of(layout, lengths, num_replicas):
        found = _plan(layout, Grouper(layout, [lengths[i] for i in share], packed))
        if found is None:
            return None
        plans.append(of_share(found, share))
    return tuple(plans)


def _plan(layout: Layout, grouper: Grouper) -> BatchPlan | None:
    for per_rank in _MICROBATCHES_PER_RANK:
        starts = grouper.within(grouper.num_tokens / (per_rank * layout.placement.num_ranks))
        sizes, samples = grouper.sizes(starts), grouper.samples(starts)
        problem = layout.problem(sizes)
        sequence = valley(problem)
        placement = layout.placed(problem, sizes, sequence)
        in_order = sequence.tolist()
        for name in _SCHEDULES:
            try:
                plan = NAMED[name](placement, len(starts))
                check(plan)
            except RotaError:
                continue  # for other placements or numbers, or it does not fit in memory
            bounds = [bound for bound in of_grouping(problem, compiled=False) if bound.among == ALL_ORDERS]
            return BatchPlan(
                plan,
                tuple(samples[m] for m in in_order),
                tuple(sizes[m] for m in in_order),
                simulate(plan).makespan_us,
                (max(bounds, key=lambda bound: bound.us),),
            )
    return None
