"""Simulating 64 ranks x 512 micro-batches with transfers and memory: ops per second, and nodes with shared links."""

from __future__ import annotations

import platform
import time
from dataclasses import replace
from statistics import median

from rota import Cluster, Costs, Link, Plan, place, simulate
from rota.core.cluster import SharedLink
from rota.core.tasks import Transfer
from rota.schedules import one_f_one_b

NUM_RANKS, NUM_MICROBATCHES, REPEATS = 64, 512, 7


def main() -> None:
    costs = Costs.uniform(NUM_RANKS, 100, 200, activation_bytes=1000, boundary_bytes=64)
    every = tuple(range(NUM_RANKS))
    hosts = tuple(SharedLink(f"host {h}", 20, every[8 * h : 8 * h + 8], every) for h in range(NUM_RANKS // 8))
    wires = Cluster((None,) * NUM_RANKS, Link(3, 10), shared=hosts)
    print(f"Python {platform.python_version()}, {platform.machine()}")
    cases = [("links of their own", place(costs, Cluster.uniform(NUM_RANKS, latency_us=3, bytes_per_us=10)), False)]
    cases += [("shared links, in order", place(costs, wires), True), ("first come", place(costs, wires), False)]
    for name, placement, in_order in cases:
        plan = one_f_one_b(placement, NUM_MICROBATCHES)
        served = _service_orders(plan) if in_order else ()
        rates = []
        for _ in range(REPEATS):
            plan = replace(one_f_one_b(placement, NUM_MICROBATCHES), service_orders=served)  # fresh: nothing is cached
            start_s = time.perf_counter()
            timeline = simulate(plan)
            peaks = timeline.peak_memory_bytes
            took_s = time.perf_counter() - start_s
            rates.append(len(plan.graph.durations_us) / took_s)
        print(
            f"{name}: {len(plan.graph.durations_us):,} nodes, {plan.num_ops:,} of them ops; makespan "
            f"{timeline.makespan_us:,} µs, peak of rank 0 {peaks[0]:,} bytes; {median(rates):,.0f} nodes/s "
            f"(median of {REPEATS}; {min(rates):,.0f} to {max(rates):,.0f})",
            flush=True,
        )


def _service_orders(plan: Plan) -> tuple[tuple[Transfer, ...], ...]:
    """First come, first served, written down."""
    transfers = {
        first + k: plan.placement.transfer(route, microbatch)
        for route, first in plan.shared_transfers.first.items()
        for k, microbatch in enumerate(plan.microbatches_on(route))
    }
    return tuple(tuple(transfers[node] for node in nodes) for nodes in plan.served)


if __name__ == "__main__":
    main()
