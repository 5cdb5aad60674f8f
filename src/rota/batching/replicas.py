"""A batch shared among replicas: each gets samples that take about as long, and a plan of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heapreplace

import numpy as np

from rota.batching.figures import Layout, Place
from rota.batching.grouping import Grouper
from rota.batching.planning import plan_batch
from rota.batching.result import BatchPlan
from rota.core.cluster import Cluster
from rota.core.errors import SearchError
from rota.core.placing import place as place_chain
from rota.core.sizes import SizeModel


def plan_replicas(
    model: SizeModel,
    cluster: Cluster,
    lengths: Sequence[int],
    num_replicas: int,
    *,
    packed: bool = False,
    place: Place = place_chain,
    tries: int | None = None,
    time_limit_s: float | None = None,
) -> tuple[BatchPlan, ...]:
    """One plan per replica. The longest samples go first, each to the replica with least predicted work so far.

    That is Graham's LPT rule ("Bounds on Multiprocessing Timing Anomalies", 1969). Replicas reduce their gradients
    together, so the step lasts as long as the slowest one.

    Args:
        model: As in `plan_batch`.
        cluster: The ranks of one replica.
        lengths: The number of tokens of each sample of the whole batch.
        num_replicas: Number of replicas, at most one per sample.
        packed: As in `plan_batch`.
        place: As in `plan_batch`.
        tries: As in `plan_batch`, per replica.
        time_limit_s: As in `plan_batch`, for all replicas together: each gets the same part.

    Returns:
        The plans; `groups` has indices into `lengths`.

    Raises:
        SearchError: As `plan_batch`, or a replica gets no sample.
        PlacementError: The stages do not fit the cluster.
    """
    layout = Layout.of(model, cluster, place)
    Grouper(layout, lengths, packed)  # refuses a sample that fits nowhere by its index in the whole batch
    part_s = None if time_limit_s is None else time_limit_s / num_replicas
    plans = []
    for share in shares_of(layout, lengths, num_replicas):
        own = [lengths[i] for i in share]
        found = plan_batch(model, cluster, own, packed=packed, place=place, tries=tries, time_limit_s=part_s)
        plans.append(of_share(found, share))
    return tuple(plans)


def shares_of(layout: Layout, lengths: Sequence[int], num_replicas: int) -> list[list[int]]:
    """Each replica's samples, by the rule of `plan_replicas`. Raises SearchError if a replica gets none."""
    if not 1 <= num_replicas <= len(lengths):
        raise SearchError(f"num_replicas is {num_replicas} for {len(lengths)} samples; give each replica at least one")
    given = np.array(lengths, np.float64)
    times = (layout.work()[:, 1:] @ np.stack([given, given * given])).max(axis=0)
    shares: list[list[int]] = [[] for _ in range(num_replicas)]
    loads = [(0.0, replica) for replica in range(num_replicas)]
    heapify(loads)
    for sample in np.argsort(-times, kind="stable").tolist():
        load, replica = loads[0]
        heapreplace(loads, (load + float(times[sample]), replica))
        shares[replica].append(sample)
    return [sorted(share) for share in shares]


def of_share(found: BatchPlan, share: Sequence[int]) -> BatchPlan:
    """The plan of a replica's samples, whose groups have indices into the whole batch instead of into `share`."""
    return replace(found, groups=tuple(tuple(share[i] for i in group) for group in found.groups))
