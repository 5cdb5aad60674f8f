"""Simulating 64 ranks x 512 micro-batches with transfers and memory: ops per second."""

from __future__ import annotations

import platform
import time
from statistics import median

from rota import Cluster, Costs, place, simulate
from rota.schedules import one_f_one_b

NUM_RANKS, NUM_MICROBATCHES, REPEATS = 64, 512, 7


def main() -> None:
    costs = Costs.uniform(NUM_RANKS, 100, 200, activation_bytes=1000, boundary_bytes=64)
    placement = place(costs, Cluster.uniform(NUM_RANKS, latency_us=3, bytes_per_us=10))
    rates = []
    for _ in range(REPEATS):
        plan = one_f_one_b(placement, NUM_MICROBATCHES)  # a fresh plan: nothing is cached
        start_s = time.perf_counter()
        timeline = simulate(plan)
        peaks = timeline.peak_memory_bytes
        rates.append(plan.num_ops / (time.perf_counter() - start_s))
    print(f"Python {platform.python_version()}, {platform.machine()}")
    print(f"{plan.num_ops:,} ops, makespan {timeline.makespan_us:,} µs, peak of rank 0 {peaks[0]:,} bytes")
    print(f"{median(rates):,.0f} ops/s (median of {REPEATS}; {min(rates):,.0f} to {max(rates):,.0f})")


if __name__ == "__main__":
    main()
