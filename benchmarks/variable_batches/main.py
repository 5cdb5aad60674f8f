"""plan_batch against other ways to make micro-batches, on equal costs: speed, gaps to the bounds, time to plan.

python benchmarks/variable_batches/main.py [--batches 200] [--ranks 8] [--only bimodal] [--results FILE] [--small]

--results keeps what each batch gave, one line of JSON each: a run that was ended goes on from there. Nothing but the
column of times depends on how busy the machine is.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dynapipe
import numpy as np

from rota import Cluster, Curve, SizeModel, find_plan, place, plan_batch
from rota.batching.figures import Layout
from rota.batching.policies import by_policy
from rota.batching.rules import by_rule

BYTES_PER_TOKEN = 1_000
TOKENS_IN_FLIGHT = 8_192  # that a rank has room for, times the number of ranks: 1F1B's memory
SAMPLES = {"bimodal": 1_700, "heavy tail": 1_000, "uniform": 1_100}  # of 8 ranks: about 64 micro-batches


def model(num_ranks: int, split: bool) -> SizeModel:
    """Equal stages: 60 µs and 20 ns per token, and attention; the backward takes twice as long as the forward."""
    forward = Curve(60, 0.02, 4e-6)
    backward = forward if split else Curve(120, 0.04, 8e-6)
    return SizeModel(
        (forward,) * num_ranks,
        (backward,) * num_ranks,
        (forward,) * num_ranks if split else None,
        activation_bytes=(Curve(0, BYTES_PER_TOKEN),) * num_ranks,
        boundary_bytes=(Curve(0, 8),) * (num_ranks - 1),
    )


def draw(name: str, count: int, rng: np.random.Generator) -> list[int]:
    """Lengths like those of instructions (many short, some long), log-normal with a heavy tail, or uniform."""
    if name == "bimodal":
        lengths = np.where(rng.random(count) < 0.8, rng.lognormal(4.0, 0.5, count), rng.lognormal(6.5, 0.4, count))
    elif name == "heavy tail":
        lengths = rng.lognormal(5.0, 1.2, count)
    else:
        lengths = rng.uniform(200, 600, count)
    return [int(length) for length in np.clip(lengths, 8, TOKENS_IN_FLIGHT)]


def scheduled_us(layout: Layout, groups: Sequence[Sequence[int]], lengths: Sequence[int]) -> int:
    """The makespan of groups in their order, with the best of plan_batch's own rules and policies, but no search."""
    problem, sequence = layout.problem(dynapipe.sizes_of(groups, lengths)), np.arange(len(groups))
    found = [orders for orders in (by_rule(problem, sequence), by_policy(problem, sequence)) if orders]
    return min(orders.makespan_us for orders in found)


def by_rows(lengths: Sequence[int], room_tokens: int) -> list[list[int]]:
    """As many rows in each micro-batch as fit if all are padded to the longest of the batch."""
    rows = max(room_tokens // max(lengths), 1)
    return [[*range(i, min(i + rows, len(lengths)))] for i in range(0, len(lengths), rows)]


def by_tokens(order: Sequence[int], lengths: Sequence[int], room_tokens: int) -> list[list[int]]:
    """Samples in this order, until the padded micro-batch is full."""
    groups: list[list[int]] = [[]]
    for i in order:
        group = [*groups[-1], i]
        if groups[-1] and len(group) * max(lengths[j] for j in group) > room_tokens:
            groups.append([i])
        else:
            groups[-1] = group
    return groups


def measured(name: str, split: bool, memory: float, num_ranks: int, seed: int) -> dict[str, Any]:
    """One batch: the gaps of its plan, how much longer the others' steps are, and the time to plan it."""
    limit = int(num_ranks * TOKENS_IN_FLIGHT * BYTES_PER_TOKEN * memory)
    cluster, costs = Cluster.uniform(num_ranks, limit, 5, 4_000), model(num_ranks, split)
    layout, room = Layout.of(costs, cluster, place), int(TOKENS_IN_FLIGHT * memory)
    lengths = draw(name, SAMPLES[name] * num_ranks // 8 * (1 + (num_ranks > 8)), np.random.default_rng(seed))
    began = time.perf_counter()
    found = plan_batch(costs, cluster, lengths)
    seconds = time.perf_counter() - began
    padded = [max(lengths)] * len(lengths)
    falling = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    others = {
        "padded": scheduled_us(layout, by_rows(lengths, room), padded),
        "token budget": scheduled_us(layout, by_tokens(range(len(lengths)), lengths, room), lengths),
        "sorted": scheduled_us(layout, by_tokens(falling, lengths, room), lengths),
        "DynaPipe": dynapipe.makespan_us(
            layout.problem(dynapipe.sizes_of(dynapipe.groups_of(layout, lengths, limit), lengths))
        ),
    }
    return {
        "gains": {other: us / found.makespan_us for other, us in others.items()},
        "gap": found.gap,
        "all": found.gap_of_all_orders,
        "groups": len(found.groups),
        "seconds": seconds,
    }


def compare(name: str, split: bool, memory: float, num_ranks: int, num_batches: int, results: Path | None) -> None:
    """Prints a row: the batches that `results` has, and the others, which are added to it."""
    case = [name, split, memory, num_ranks]
    lines = results.read_text().splitlines() if results is not None and results.exists() else []
    known = {seed: found for *of, seed, found in map(json.loads, lines) if of == case}
    plan_batch(model(num_ranks, split), Cluster.uniform(num_ranks), [5, 6, 7])  # compiles
    rows = []
    for seed in range(num_batches):
        if seed not in known:
            known[seed] = measured(name, split, memory, num_ranks, seed)
            if results is not None:
                with results.open("a") as file:
                    file.write(f"{json.dumps([*case, seed, known[seed]])}\n")
        rows.append(known[seed])
    gains = {other: [row["gains"][other] for row in rows] for other in rows[0]["gains"]}
    cells = [f"{np.mean(gain):.2f} ({min(gain):.2f})" for gain in gains.values()]
    p50, p95 = np.quantile([row["gap"] for row in rows], [0.5, 0.95])
    all50, all95 = np.quantile([row["all"] for row in rows], [0.5, 0.95])
    counts, times = [row["groups"] for row in rows], [row["seconds"] for row in rows]
    print(
        f"| {name} | {'split' if split else 'whole'} | {memory:g} | {np.mean(counts):.0f} | {' | '.join(cells)} "
        f"| {p50:.1%} / {p95:.1%} | {all50:.1%} / {all95:.1%} | {np.median(times) * 1e3:.0f} |",
        flush=True,
    )


def small_cases(count: int) -> None:
    """Random small batches: plan_batch against the optimum of all orders of its grouping, where CP-SAT closes it."""
    off: list[float] = []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        num_ranks, split = int(rng.integers(2, 4)), bool(rng.integers(2))
        lengths = draw(("bimodal", "heavy tail", "uniform")[seed % 3], int(rng.integers(4, 8)), rng)
        limit = int(max(*lengths, sum(lengths) * rng.uniform(0.3, 1.0)) * 1.1 * BYTES_PER_TOKEN)
        found = plan_batch(model(num_ranks, split), Cluster.uniform(num_ranks, limit, 5, 4_000), lengths)
        best = find_plan(found.plan.placement, len(found.groups), time_limit_s=5)
        if best.gap == 0:
            off.append(found.makespan_us / best.makespan_us - 1)
    print(
        f"{count} small batches, {len(off)} closed: {np.mean(off):.2%} above the optimum on average, {max(off):.2%} at "
        f"most, {np.mean(np.array(off) == 0):.0%} optimal"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--only", choices=SAMPLES)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--small", action="store_true", help="small batches against their optimum instead")
    given = parser.parse_args()
    if given.small:
        small_cases(60)
        return
    columns = ["lengths", "backward", "memory", "micro-batches", "padded", "token budget", "sorted", "DynaPipe"]
    print("| " + " | ".join([*columns, "gap p50 / p95", "all orders", "ms"]) + " |")
    print("|" + "---|" * 11)
    for name in [given.only] if given.only else SAMPLES:
        for split in (False, True):
            for memory in (1.0, 0.75):
                compare(name, split, memory, given.ranks, given.batches, given.results)


if __name__ == "__main__":
    main()
