"""Shared links in terms of ranks and tasks: a search then has a step like any other.

    rank 0    F0 F1 F2                      each shared link becomes one more rank, without a memory limit,
    rank 1          F0  F1  F2              and a transfer that it serves one more task, for as long as it serves it
    link      00 11 22                      (on several such ranks, if the transfer uses several shared links at once)

What all methods find out about ranks then holds for shared links too. A transfer's micro-batches are served in order,
as in every other task: they occupy the link equally long, so exchanging two makes nothing later, and what is held at a
time depends only on how many have begun and ended by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rota.core.cluster import Cluster
from rota.core.placement import Placement
from rota.core.tasks import Edge, Kind, Route, Task, scalar


class Instant(NamedTuple):
    """`lag_us` after the end of an op, by its task or by its node; less than 0 is before it."""

    op: int
    lag_us: int


class Carried(NamedTuple):
    """What a transfer of each micro-batch holds on one of its two ranks, and from when until when."""

    rank: int
    num_bytes: int
    since: Instant
    until: Instant
    is_sent: bool  #: the rank sends it; else it receives it, and holds it until the op ends that reads it

    def between(self, since: int, until: int) -> Carried:
        """The same for one micro-batch, whose ops are these nodes."""
        return self._replace(since=self.since._replace(op=since), until=self.until._replace(op=until))


@dataclass(frozen=True)
class Lowered:
    """A placement without shared links, for a search.

    Attributes:
        placement: The tasks of the original placement and then the services; the ranks and then the shared links.
        lags_us: (source, target) -> µs from the end of the source until the last rank of the target has its data.
        services: For each service the index of its route in the original placement.
        carried: What transfers hold.
    """

    placement: Placement
    lags_us: dict[tuple[int, int], int]
    services: tuple[int, ...]
    carried: tuple[Carried, ...]


def lower(placement: Placement) -> Lowered:
    """The same step without shared links; where there are none, on the same placement."""
    services = tuple(r for r, route in enumerate(placement.routes) if route.shared)
    task_of = {r: len(placement.tasks) + i for i, r in enumerate(services)}
    lags_us = _lags_us(placement, task_of)
    transfers = ((route, task_of.get(r)) for r, route in enumerate(placement.routes) if route.num_bytes)
    carried = tuple(carried for route, service in transfers for carried in _carried(route, service))
    lowered = _lowered_placement(placement, services, lags_us) if placement.cluster.shared else placement
    return Lowered(lowered, lags_us, services, carried)


def _lags_us(placement: Placement, task_of: dict[int, int]) -> dict[tuple[int, int], int]:
    lags = {(edge.source, edge.target): 0 for edge in placement.edges}
    through: dict[tuple[int, int], int] = {}
    for r, route in enumerate(placement.routes):
        if r in task_of:
            through[route.source, task_of[r]] = 0
            through[task_of[r], route.target] = scalar(route.duration_us) - scalar(route.service_us)
            lags.pop((route.source, route.target), None)  # follows from these two
    for r, route in enumerate(placement.routes):
        if r not in task_of:
            edge = route.source, route.target
            lags[edge] = max(lags.get(edge, 0), scalar(route.duration_us))
    return lags | through


def _carried(route: Route, service: int | None) -> tuple[Carried, Carried]:
    """On the sender from the op's end until the data arrives; on the receiver from the transfer's start."""
    num_bytes, duration_us, service_us = map(scalar, (route.num_bytes, route.duration_us, route.service_us))
    made = sent = Instant(route.source, 0)
    arrived = Instant(route.source, duration_us)
    if service is not None:
        sent = Instant(service, -service_us)
        arrived = Instant(service, duration_us - service_us)
    return (
        Carried(route.sender, num_bytes, made, arrived, True),
        Carried(route.receiver, num_bytes, sent, Instant(route.target, 0), False),
    )


def _lowered_placement(
    placement: Placement, services: tuple[int, ...], lags_us: dict[tuple[int, int], int]
) -> Placement:
    tasks = [*placement.tasks]
    free = 1 + max(placement.stages)
    for i, r in enumerate(services):
        links = tuple(placement.num_ranks + link for link in placement.routes[r].shared)
        tasks.append(Task(free + i, Kind.F, links, placement.routes[r].service_us))
    num_links = len(placement.cluster.shared)
    cluster = Cluster((*placement.cluster.limit_bytes, *[None] * num_links))
    edges = tuple(Edge(*pair) for pair in lags_us)
    static_bytes = (*placement.static_bytes, *[0] * num_links)
    return Placement(tuple(tasks), edges, cluster, static_bytes, placement.step_ends)
