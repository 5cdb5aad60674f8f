"""Placements of named schedules that offload."""

from dataclasses import replace

from rota import Kind, Placement
from rota.core.tasks import Edge, Task


def with_offload(placement: Placement, share: float, bytes_per_us: int = 1000) -> Placement:
    """Each stage copies this share of what its F holds to the host; 0: the placement itself."""
    if not share:
        return placement
    tasks, edges = [*placement.tasks], [*placement.edges]
    for stage in placement.stages:
        forward, ranks = placement.index[stage, Kind.F], placement.ranks_of(stage)
        back = next(placement.index[stage, kind] for kind in (Kind.B, Kind.I) if placement.task(stage, kind))
        size = int(placement.tasks[forward].held_bytes * share)
        offload, load = len(tasks), len(tasks) + 1
        tasks += [Task(stage, Kind.O, ranks, 0, -size), Task(stage, Kind.L, ranks, 0, size)]
        edges += [Edge(forward, offload, size), Edge(offload, load), Edge(load, back, size)]
    cluster = placement.cluster.with_host_links(bytes_per_us)
    return replace(placement, tasks=tuple(tasks), edges=tuple(edges), cluster=cluster)
