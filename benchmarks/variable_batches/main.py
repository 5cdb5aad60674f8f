"""plan_batch against other ways to make micro-batches, on equal costs: speed, gaps to the bounds, time to plan.

python benchmarks/variable_batches/main.py [--batches 200] [--ranks 8] [--only bimodal]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import dynapipe
import numpy as np

from rota import Cluster, Curve, SizeModel, place, plan_batch
from rota.batching.figures import Layout
from rota.batching.improving import best_policy

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
    """The makespan of groups in their order, with the best of plan_batch's own policies, but no search."""
    problem = layout.problem(dynapipe.sizes_of(groups, lengths))
    return best_policy(problem, np.arange(len(groups)))[1].makespan_us


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


def compare(name: str, split: bool, memory: float, num_ranks: int, num_batches: int) -> None:
    limit = int(num_ranks * TOKENS_IN_FLIGHT * BYTES_PER_TOKEN * memory)
    cluster, costs = Cluster.uniform(num_ranks, limit, 5, 4_000), model(num_ranks, split)
    layout, room = Layout.of(costs, cluster, place), int(TOKENS_IN_FLIGHT * memory)
    gains: dict[str, list[float]] = {}
    gaps, all_gaps, times, counts = [], [], [], []
    plan_batch(costs, cluster, [5, 6, 7])  # compiles
    for seed in range(num_batches):
        lengths = draw(name, SAMPLES[name] * (num_ranks // 8) ** 2 or SAMPLES[name], np.random.default_rng(seed))
        began = time.perf_counter()
        found = plan_batch(costs, cluster, lengths)
        times.append(time.perf_counter() - began)
        gaps.append(found.gap)
        all_gaps.append(found.gap_of_all_orders)
        counts.append(len(found.groups))
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
        for other, us in others.items():
            gains.setdefault(other, []).append(us / found.makespan_us)
    cells = [f"{np.mean(gain):.2f} ({min(gain):.2f})" for gain in gains.values()]
    p50, p95 = np.quantile(gaps, [0.5, 0.95])
    all50, all95 = np.quantile(all_gaps, [0.5, 0.95])
    print(
        f"| {name} | {'split' if split else 'whole'} | {memory:g} | {np.mean(counts):.0f} | {' | '.join(cells)} "
        f"| {p50:.1%} / {p95:.1%} | {all50:.1%} / {all95:.1%} | {np.median(times) * 1e3:.0f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--only", choices=SAMPLES)
    given = parser.parse_args()
    columns = ["lengths", "backward", "memory", "micro-batches", "padded", "token budget", "sorted", "DynaPipe"]
    print("| " + " | ".join([*columns, "gap p50 / p95", "all orders", "ms"]) + " |")
    print("|" + "---|" * 11)
    for name in [given.only] if given.only else SAMPLES:
        for split in (False, True):
            for memory in (1.0, 0.75):
                compare(name, split, memory, given.ranks, given.batches)


if __name__ == "__main__":
    main()
