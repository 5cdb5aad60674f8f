"""Random problems whose transfers hold memory under tight limits: how often is the exact optimum found in a second?

python benchmarks/search/transfers.py [first seed] [last seed + 1] [nominal seconds]

Each problem has a plan: its limits are what random orders need. The reference is CP-SAT on the whole step with every
level counted by time, run until it has a proof, and started from nothing that the search found. Where the bound of the
search proves its plan, no reference is needed.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from random import Random

import numpy as np

from rota import Cluster, Costs, bidirectional, find_plan, interleaved, place, simulate, wave
from rota.core.errors import SearchError
from rota.core.placement import Placement
from rota.search.budget import Budget
from rota.search.exact import solve
from rota.search.problem import Orders, Problem

_REFERENCE_S = 60.0  # nominal, for the proof


def problem_of(seed: int) -> Problem:
    """16 to 60 ops on 2 to 4 ranks, with the least limits that some random orders need."""
    chooser = Random(seed)
    num_ranks = chooser.choice((2, 2, 3, 3, 4))
    kind = chooser.choice(("chain", "chain", "wave", "interleaved", "skip", "bidirectional"))
    stages = num_ranks * (2 if kind in ("wave", "interleaved") else 1)

    def some(*values: int) -> tuple[int, ...]:
        return tuple(chooser.choice(values) for _ in range(stages))

    held = some(1, 2, 2, 3, 4)
    edges = (*((i, i + 1) for i in range(stages - 1)), (0, stages - 1))
    costs = Costs(
        some(1, 2, 2, 3, 4, 5),
        some(1, 2, 3, 4, 6, 8),
        some(1, 2, 3, 4) if chooser.random() < 0.4 else None,
        activation_bytes=held,
        input_frees_bytes=tuple(chooser.randint(0, h) for h in held),
        boundary_bytes=chooser.choice((1, 1, 2, 3)),
        edges=edges if kind == "skip" and stages > 2 else None,
    )
    cluster = Cluster.uniform(num_ranks, latency_us=chooser.choice((1, 1, 2, 3, 5)))
    placed = {"wave": wave, "interleaved": interleaved, "bidirectional": bidirectional}.get(kind, place)(costs, cluster)
    num_microbatches = max(2, min(chooser.randint(16, 60) // len(placed.tasks), 8)) * placed.num_components
    return Problem(_limited(placed, num_microbatches, chooser), num_microbatches)


def _limited(placement: Placement, num_microbatches: int, chooser: Random) -> Placement:
    problem = Problem(placement, num_microbatches)
    tries = range(chooser.choice((1, 3, 10, 30)))
    peaks = [simulate(problem.to_plan(random_orders(problem, chooser))).peak_memory_bytes for _ in tries]
    limits = tuple(None if chooser.random() < 0.1 else peak for peak in min(peaks, key=sum))
    return replace(placement, cluster=replace(placement.cluster, limit_bytes=limits))


def random_orders(problem: Problem, chooser: Random) -> Orders:
    """Ops one after the other, each when its inputs are there; often the deepest first, which needs little memory."""
    counts = problem.counts.tolist()
    done = [0] * len(counts)
    rows: list[list[int]] = [[] for _ in range(problem.placement.num_ranks)]
    weight = chooser.choice((0.3, 1.0, 3.0))
    deepness = [i / len(counts) if chooser.random() < 0.7 else chooser.random() for i in range(len(counts))]
    for _ in range(sum(counts)):
        ready = [
            t
            for t in range(len(counts))
            if done[t] < counts[t] and all(done[s] > done[t] for s in problem.inputs[t][::2])
        ]
        task = max(ready, key=lambda t: chooser.random() + weight * deepness[t])
        done[task] += 1
        for rank in problem.placement.tasks[task].ranks:
            rows[rank].append(task)
    return np.array([task for row in rows for task in row], np.int32)


def main() -> None:
    first, last = int(sys.argv[1]) if len(sys.argv) > 1 else 0, int(sys.argv[2]) if len(sys.argv) > 2 else 1000
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 1.0
    counts = dict.fromkeys(("problems", "without a reference", "refused", "optimal", "proven", "above"), 0)
    slowest_s = 0.0
    for seed in range(first, last):
        if counts["problems"] and counts["problems"] % 50 == 0:
            print(f"{counts}, slowest search {slowest_s:.1f} s", flush=True)
        problem = problem_of(seed)
        counts["problems"] += 1
        began = time.perf_counter()
        try:
            result = find_plan(problem.placement, problem.num_microbatches, time_limit_s=seconds, deterministic=True)
        except SearchError as error:
            counts["refused"] += 1
            print(f"seed {seed}: refused: {error}", flush=True)
            continue
        slowest_s = max(slowest_s, time.perf_counter() - began)
        counts["proven"] += result.is_optimal
        assert result.bound_us <= result.makespan_us
        if result.is_optimal:
            counts["optimal"] += 1
            continue
        reference = solve(
            problem, "makespan", None, 0, Budget(_REFERENCE_S, deterministic=True), transfers="as in a plan"
        )
        if not reference.is_complete:
            counts["without a reference"] += 1
            print(f"seed {seed}: found {result.makespan_us}, no reference in {_REFERENCE_S} s", flush=True)
        elif result.makespan_us <= reference.bound_us:
            counts["optimal"] += 1
            assert result.makespan_us == reference.bound_us, f"seed {seed}: below what was proven"
        else:
            counts["above"] += 1
            print(f"seed {seed}: found {result.makespan_us}, best {reference.bound_us}", flush=True)
    print(f"{counts}, slowest search {slowest_s:.1f} s")


if __name__ == "__main__":
    main()
