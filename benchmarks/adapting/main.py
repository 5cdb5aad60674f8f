"""What another order gains when one rank is slow: predicted for many plans, and measured with `rota run --adapt`.

python benchmarks/adapting/main.py [--only predicted|measured] [--slow-rank 0] [--factor 1.5] [--forward-ms 3]
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch

from rota import Cluster, Costs, Placement, Plan, interleaved, place, simulate
from rota.schedules import interleaved_one_f_one_b, one_f_one_b, zb_h1
from rota.search.reordering import reorder

TRAIN = Path(__file__).parent / "train.py"
NUM_RANKS, NUM_MICROBATCHES = 4, 8
FACTORS = (1.25, 1.5, 2.0)
SLOW_FROM, SLOW_TO, NUM_STEPS = 21, 171, 330
SKIPPED = 2  # steps behind a change, in which it is felt only in part

Schedule = Callable[[Placement, int], Plan]


def plans() -> dict[str, Plan]:
    """What runs when the rank becomes slow; with twice the memory that it needs where it says so."""
    cluster = Cluster.uniform(NUM_RANKS)
    whole, split = Costs.uniform(NUM_RANKS, 100, 200), Costs.uniform(NUM_RANKS, 100, 100, weight_us=100)
    two_each = Costs.uniform(2 * NUM_RANKS, 50, 100)
    found = {
        "1f1b": one_f_one_b(place(whole, cluster), NUM_MICROBATCHES),
        "zb_h1": zb_h1(place(split, cluster), NUM_MICROBATCHES),
        "interleaved": interleaved_one_f_one_b(interleaved(two_each, cluster), NUM_MICROBATCHES),
    }
    return found | {f"{name}, twice the memory": with_memory(plan, 2) for name, plan in found.items()}


def with_memory(plan: Plan, times: int) -> Plan:
    limits = tuple(times * peak for peak in simulate(plan).peak_memory_bytes)
    cluster = replace(plan.placement.cluster, limit_bytes=limits)
    return replace(plan, placement=replace(plan.placement, cluster=cluster))


def with_slow_rank(plan: Plan, rank: int, factor: float) -> Plan:
    tasks = tuple(
        replace(task, duration_us=round(task.duration_us * factor)) if rank in task.ranks else task
        for task in plan.placement.tasks
    )
    return replace(plan, placement=replace(plan.placement, tasks=tasks))


def predict(time_limit_s: float) -> None:
    """A table of how much shorter a step gets by the best order that is found, and how much could be at most."""
    print(f"predicted: {NUM_RANKS} ranks, {NUM_MICROBATCHES} micro-batches, one rank slow; a step gets shorter by")
    print(
        f"{'plan':<30}{'times as slow':>14}"
        + "".join(f"{f'rank {rank}':>9}" for rank in range(NUM_RANKS))
        + "  at most"
    )
    for name, plan in plans().items():
        for factor in FACTORS:
            found = [
                reorder(with_slow_rank(plan, rank, factor), time_limit_s=time_limit_s) for rank in range(NUM_RANKS)
            ]
            gains = "".join(f"{1 - one.makespan_us / one.before_us:>9.1%}" for one in found)
            most = max(1 - one.bound_us / one.before_us for one in found)
            print(f"{name:<30}{factor:>14}{gains}{most:>9.1%}", flush=True)


def run(forward_ms: float, slow_rank: int, factor: float, options: list[str]) -> tuple[list[float], list[float], str]:
    """The loss and the duration in ms of each step, and what the command said."""
    us = round(1000 * forward_ms)
    placement = place(Costs.uniform(NUM_RANKS, us, 2 * us), Cluster.uniform(NUM_RANKS))
    plan = with_memory(one_f_one_b(placement, NUM_MICROBATCHES), 2)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "plan.json").write_text(plan.to_json())
        steps = [SLOW_FROM, SLOW_TO, NUM_STEPS]
        words = [str(TRAIN), *map(str, [forward_ms, slow_rank, factor, *steps])]
        done = subprocess.run(
            [sys.executable, "-m", "rota", "run", *options, "plan.json", *words],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        rows = [line.split() for line in Path(folder, "steps").read_text().splitlines()]
    return [float(loss) for _, loss, _ in rows], [1000 * float(took_s) for *_, took_s in rows], done.stderr


def measure(forward_ms: float, slow_rank: int, factor: float) -> None:
    """The step time before the rank is slow, while it is, and afterwards."""
    losses, took_ms, told = run(forward_ms, slow_rank, factor, ["--adapt"])
    print(f"measured: 1f1b with twice the memory that it needs, rank {slow_rank} {factor} times as slow for a while")
    for line in told.splitlines():
        if line.startswith(("rota: rank", "rota: the order")):
            print(f"    {line}")
    swaps = [int(step) for step in re.findall(r"from step (\d+) on", told)]
    edges = sorted({1, SLOW_FROM, SLOW_TO, NUM_STEPS + 1, *swaps})
    print(f"{'steps':<14}{'median of a step':>18}   rank {slow_rank}")
    for first, last in pairwise(edges):
        part = took_ms[first - 1 + SKIPPED : last - 1]
        if part:
            state = "slow" if SLOW_FROM <= first < SLOW_TO else "as planned"
            swapped = ", another order" if sum(swap <= first for swap in swaps) % 2 else ""
            print(f"{f'{first} to {last - 1}':<14}{statistics.median(part):>15.1f} ms   {state}{swapped}")
    looks_ms = [took_ms[n - 1] - took_ms[n - 2] for n in range(10, NUM_STEPS + 1, 10)]
    print(f"each tenth step, in which ranks compare their times, takes {statistics.median(looks_ms):.1f} ms more")
    others, other_ms, _ = run(forward_ms, slow_rank, factor, [])
    quiet = slice(SKIPPED, SLOW_FROM - 1)
    print(
        f"without --adapt: {statistics.median(other_ms[quiet]):.1f} ms as planned, "
        f"{statistics.median(other_ms[SLOW_FROM + SKIPPED : SLOW_TO - 1]):.1f} ms while it is slow"
    )
    print(f"losses of both runs differ by at most {max(abs(a - b) for a, b in zip(losses, others, strict=True)):.1e}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=["predicted", "measured"])
    parser.add_argument("--slow-rank", type=int, default=0)
    parser.add_argument("--factor", type=float, default=1.5)
    parser.add_argument("--forward-ms", type=float, default=3.0)
    parser.add_argument("--time-limit", type=float, default=1.0, help="seconds of search per entry of the table")
    arguments = parser.parse_args()
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores"
    )
    if arguments.only != "measured":
        predict(arguments.time_limit)
    if arguments.only != "predicted":
        measure(arguments.forward_ms, arguments.slow_rank, arguments.factor)


if __name__ == "__main__":
    main()
