"""1F1B, simulated and as if measured."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from rota import Cluster, Costs, Timeline, place, simulate
from rota.schedules import one_f_one_b as schedule

Rows = tuple[tuple[int, ...], ...]


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Timeline:
    """With memory, and two transfers a micro-batch and boundary."""
    costs = Costs.uniform(num_ranks, 1000, 2000, activation_bytes=10**9, boundary_bytes=64_000)
    cluster = Cluster.uniform(num_ranks, 80 * 10**9, latency_us=3, bytes_per_us=10_000)
    return simulate(schedule(place(costs, cluster), num_microbatches))


def with_jitter(planned: Timeline, seed: int) -> Timeline:
    """Ops take about a tenth more or less, transfers a few µs more."""
    chooser, plan = random.Random(seed), planned.plan
    durations = [round(us * chooser.lognormvariate(0.03, 0.1)) for us in plan.graph.durations_us]
    times = replace(plan.graph, durations_us=durations).earliest()

    def column(of_node: Sequence[int]) -> Rows:
        return tuple(tuple(of_node[node] for node in nodes) for nodes in plan.nodes)

    sent, arrived = [], []
    for route in plan.placement.routes:
        nodes = range(plan.first_node[route.source], plan.first_node[route.source + 1])
        sent.append(tuple(times.ends_us[node] + chooser.randint(0, 5) for node in nodes))
        arrived.append(tuple(start + route.duration_us + chooser.randint(0, 9) for start in sent[-1]))
    return Timeline(plan, column(times.starts_us), column(times.ends_us), tuple(sent), tuple(arrived))
