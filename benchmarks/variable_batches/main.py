"""plan_batch against other ways to make micro-batches, on equal costs: speed, gaps to the bounds, time to plan.

python benchmarks/variable_batches/main.py [--batches 200] [--seconds S]     12 kinds of batches: the table
python benchmarks/variable_batches/main.py --small [--seconds S]             small batches against their optimum
python benchmarks/variable_batches/main.py --times                           exactly 8 x 64 and 16 x 128: times

What each batch gave is kept in result.jsonl beside this file, one line of JSON each, until `--anew`: a run that was
ended, or that ended after --seconds, goes on from there. Only times depend on how busy the machine is.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import dynapipe
import numpy as np

from rota import Cluster, Curve, SizeModel, find_plan, place, plan_batch
from rota.batching.dispatching import by_policy
from rota.batching.figures import Layout
from rota.batching.rules import by_rule

RESULTS = Path(__file__).with_name("result.jsonl")
BYTES_PER_TOKEN = 1_000
TOKENS_IN_FLIGHT = 8_192  # that a rank has room for, times the number of ranks: 1F1B's memory
SAMPLES = {"bimodal": 2_400, "heavy tail": 1_500, "uniform": 1_250}  # about 64 micro-batches, with memory 1
NUM_SMALL = 90
SIZES_TIMED = ((8, 64, 0.1), (16, 128, 0.4))  # ranks, micro-batches, and the seconds that planning may take
TIMES_EACH = 3


class Case(NamedTuple):
    """Batches of one kind."""

    lengths: str
    split: bool
    memory: float

    @property
    def text(self) -> str:
        """As the first columns of a table."""
        return f"{self.lengths} | {'split' if self.split else 'whole'} | {self.memory:g}"


CASES = [Case(*case) for case in product(SAMPLES, (False, True), (1.0, 0.75))]
OF_TEXT = {case.text: case for case in CASES}


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


def setting(case: Case, num_ranks: int) -> tuple[SizeModel, Cluster]:
    limit = int(num_ranks * TOKENS_IN_FLIGHT * BYTES_PER_TOKEN * case.memory)
    return model(num_ranks, case.split), Cluster.uniform(num_ranks, limit, 5, 4_000)


# --- the others ---------------------------------------------------------------------------------------------------


def scheduled_us(layout: Layout, groups: Sequence[Sequence[int]], lengths: Sequence[int], are_alike: bool) -> int:
    """The makespan of groups in their order, with the best of plan_batch's own rules and policies, but no search.

    1F1B and ZB-H1, which are among the rules, are made for micro-batches that are all alike.
    """
    problem, sequence = layout.problem(dynapipe.sizes_of(groups, lengths)), np.arange(len(groups))
    ways = (by_rule,) if are_alike else (by_rule, by_policy)
    return min(orders.makespan_us for way in ways if (orders := way(problem, sequence)))


def by_rows(lengths: Sequence[int], room_tokens: int) -> list[list[int]]:
    """As many rows in each micro-batch as fit if all are padded to the longest of the batch."""
    rows = max(room_tokens // max(lengths), 1)
    return [[*range(i, min(i + rows, len(lengths)))] for i in range(0, len(lengths), rows)]


def by_tokens(order: Sequence[int], lengths: Sequence[int], room_tokens: int) -> list[list[int]]:
    """Samples in this order, until the padded micro-batch is full."""
    groups: list[list[int]] = [[]]
    longest = 0
    for i in order:
        longest = max(longest, lengths[i])
        if groups[-1] and (len(groups[-1]) + 1) * longest > room_tokens:
            groups.append([])
            longest = lengths[i]
        groups[-1].append(i)
    return groups


# --- one batch of each table --------------------------------------------------------------------------------------


def compared(kind: str, seed: int) -> dict[str, Any]:
    """A batch of a case: the gaps of its plan, how much longer the others' steps are, and the time to plan it."""
    case, num_ranks = OF_TEXT[kind], 8
    costs, cluster = setting(case, num_ranks)
    layout, room = Layout.of(costs, cluster, place), int(TOKENS_IN_FLIGHT * case.memory)
    lengths = draw(case.lengths, SAMPLES[case.lengths], np.random.default_rng(seed))
    began = time.perf_counter()
    found = plan_batch(costs, cluster, lengths)
    seconds = time.perf_counter() - began
    padded = [max(lengths)] * len(lengths)
    falling = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    limit = int(num_ranks * TOKENS_IN_FLIGHT * BYTES_PER_TOKEN * case.memory)
    own = dynapipe.groups_of(layout, lengths, limit)
    others = {
        "padded": scheduled_us(layout, by_rows(lengths, room), padded, are_alike=True),
        "token budget": scheduled_us(layout, by_tokens(range(len(lengths)), lengths, room), lengths, are_alike=False),
        "sorted": scheduled_us(layout, by_tokens(falling, lengths, room), lengths, are_alike=False),
        "DynaPipe": dynapipe.makespan_us(layout.problem(dynapipe.sizes_of(own, lengths))),
    }
    return {
        "gains": {other: us / found.makespan_us for other, us in others.items()},
        "gap": found.gap,
        "all": found.gap_of_all_orders,
        "groups": len(found.groups),
        "seconds": seconds,
    }


def against_optimum(_: str, seed: int) -> dict[str, Any]:
    """A random small batch: how far its plan is above the best of all orders of its grouping, if CP-SAT closes it."""
    rng = np.random.default_rng(seed)
    num_ranks, split = int(rng.integers(2, 4)), bool(rng.integers(2))
    lengths = draw([*SAMPLES][seed % 3], int(rng.integers(4, 8)), rng)
    limit = int(max(*lengths, sum(lengths) * rng.uniform(0.3, 1.0)) * 1.1 * BYTES_PER_TOKEN)
    found = plan_batch(model(num_ranks, split), Cluster.uniform(num_ranks, limit, 5, 4_000), lengths)
    best = find_plan(found.plan.placement, len(found.groups), time_limit_s=5)
    off = found.makespan_us / best.makespan_us - 1 if best.gap == 0 else None
    return {"groups": len(found.groups), "split": split, "off": off, "gap": found.gap}


def timed(case: Case, num_ranks: int, num_microbatches: int, limit_s: float) -> list[str]:
    """A batch that makes so many micro-batches: ms to plan it and its gap, with a time limit and without."""
    costs, cluster = setting(case, num_ranks)
    usual = int(SAMPLES[case.lengths] * case.memory * num_microbatches / 64)
    lengths = draw(case.lengths, 3 * usual // 2, np.random.default_rng(0))
    fewest, most = usual // 2, len(lengths)
    while fewest <= most:
        count = (fewest + most) // 2
        found = plan_batch(costs, cluster, lengths[:count], tries=0)
        if len(found.groups) == num_microbatches:
            break
        fewest, most = (count + 1, most) if len(found.groups) < num_microbatches else (fewest, count - 1)
    cells = [f"{num_ranks} x {len(found.groups)}", case.text]
    for time_limit_s in (limit_s, None):
        took_ms = []
        for _ in range(TIMES_EACH):
            began_s = time.perf_counter()
            found = plan_batch(costs, cluster, lengths[:count], time_limit_s=time_limit_s)
            took_ms.append(1e3 * (time.perf_counter() - began_s))
        cells += [f"{np.median(took_ms):.0f}", f"{max(took_ms):.0f}", f"{found.gap:.1%}"]
    return cells


# --- tables -----------------------------------------------------------------------------------------------------------


class Kept:
    """The results of batches, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._known = {tuple(key): found for *key, found in map(json.loads, lines)}

    def get(self, *key: str | int) -> dict[str, Any] | None:
        """What a batch gave, if it is known."""
        return self._known.get(key)

    def add(self, *key: str | int, found: dict[str, Any]) -> None:
        """Keeps what a batch gave."""
        self._known[key] = found
        with self._path.open("a") as file:
            file.write(f"{json.dumps([*key, found])}\n")


def complete(
    kept: Kept, keys: Iterable[tuple[str, int]], result_of: Callable[[str, int], dict[str, Any]], end_s: float
) -> None:
    """Adds the results that are not kept yet, until the time is over."""
    for key in keys:
        if kept.get(*key) is None:
            if time.monotonic() >= end_s:
                return
            kept.add(*key, found=result_of(*key))


def print_comparison(kept: Kept, num_batches: int) -> None:
    others = ["padded", "token budget", "sorted", "DynaPipe"]
    columns = ["lengths", "backward", "memory", "batches", "micro-batches", *others, "gap p50 / p95", "all orders"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for case in CASES:
        rows = [row for seed in range(num_batches) if (row := kept.get(case.text, seed))]
        if not rows:
            continue
        gains = {other: [row["gains"][other] for row in rows] for other in others}
        cells = [f"{np.mean(gain):.2f} ({min(gain):.3f})" for gain in gains.values()]
        gaps = [np.quantile([row[name] for row in rows], [0.5, 0.95]) for name in ("gap", "all")]
        cells += [f"{p50:.1%} / {p95:.1%}" for p50, p95 in gaps]
        groups = np.mean([row["groups"] for row in rows])
        print(f"| {case.text} | {len(rows)} | {groups:.0f} | {' | '.join(cells)} |")


def print_small(kept: Kept) -> None:
    rows = [row for seed in range(NUM_SMALL) if (row := kept.get("small", seed))]
    off = np.array([row["off"] for row in rows if row["off"] is not None])
    print(
        f"{len(rows)} small batches, {len(off)} closed: {off.mean():.2%} above the optimum on average, "
        f"{off.max():.2%} at most, {np.mean(off == 0):.0%} optimal"
    )


def print_times() -> None:
    limited, free = ["ms in the limit: median", "slowest", "gap"], ["ms without: median", "slowest", "gap"]
    columns = ["ranks x micro-batches", "lengths", "backward", "memory", *limited, *free]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for size in SIZES_TIMED:
        for case in CASES:
            print(f"| {' | '.join(timed(case, *size))} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=200, help="of each kind")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no batch after these")
    parser.add_argument("--small", action="store_true", help="small batches against their optimum instead")
    parser.add_argument("--times", action="store_true", help="times to plan instead")
    parser.add_argument("--anew", action="store_true", help="forget what is kept")
    given = parser.parse_args()
    end_s = time.monotonic() + given.seconds
    if given.anew:
        RESULTS.unlink(missing_ok=True)
    for case in CASES:
        plan_batch(*setting(case, 2), [5, 6, 7])  # compiles
    if given.times:
        print_times()
        return
    kept = Kept(RESULTS)
    if given.small:
        complete(kept, (("small", seed) for seed in range(NUM_SMALL)), against_optimum, end_s)
        print_small(kept)
        return
    keys = ((case.text, seed) for seed in range(given.batches) for case in CASES)  # all kinds advance together
    complete(kept, keys, compared, end_s)
    print_comparison(kept, given.batches)


if __name__ == "__main__":
    main()
