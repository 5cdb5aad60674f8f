"""Search against what others reach: periods, whole steps, the zero-bubble shape, tight memory, large steps.

python benchmarks/search/main.py                  all sections, about an hour
python benchmarks/search/main.py periods large    some of them
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

from heuristic import climb
from rows import rows

from rota import Cluster, Costs, Placement, Timeline, find_frontier, find_plan, place, simulate, wave
from rota.schedules import one_f_one_b, v_half, v_min, zb_h1, zb_h2
from rota.search import Progress, find_steady
from rota.search.budget import Budget

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.tessel_shapes import tessel

LIMITS = {4: {"v": 4, "x": 4}, 8: {"v": 8, "x": 8}, 16: {"v": 16}, 32: {"v": 32}}
OTHER_LIMITS = {4: 6, 8: 20, 16: 60, 32: 120}


def warm_up() -> None:
    """Compiled code is loaded, and made the first time ever."""
    find_plan(zero_bubble(4, (3, 2, 2), 1, 8, 0), 8, objective="span", time_limit_s=2)


# --- Tessel's placements ---------------------------------------------------------------------------------------------


def periods() -> None:
    print("shape      ranks  limit  a micro-batch   at least      s    inference      s")
    for num_ranks, limits in LIMITS.items():
        shapes = ("v", "x", "k", "m", "nn", "nn-eager") if num_ranks <= 8 else ("v", "k", "m", "nn")
        for shape in shapes:
            limit = limits.get(shape, OTHER_LIMITS[num_ranks])
            placement = tessel(shape, num_ranks, limit)
            found, took_s = steady(placement)
            forward = replace(placement, cluster=Cluster.uniform(num_ranks)).forward_only()
            inference, inference_s = steady(forward)
            print(f"{shape:<9}{num_ranks:>7}{limit:>7}  {found}{took_s:>7.2f}    {inference}{inference_s:>7.2f}")


def steady(placement: Placement) -> tuple[str, float]:
    began = time.perf_counter()
    found = find_steady(placement, Budget(10))
    took_s = time.perf_counter() - began
    assert found is not None
    found.steady.verify()
    proven = "=" if found.is_optimal else ">="
    return f"{float(found.steady.us_per_microbatch):>9.3f} {proven:>2} {float(found.bound_us):>9.3f}", took_s


def steps() -> None:
    """Whole steps of 128 micro-batches on 4 ranks; X has 128 in each direction."""
    bars = [("v", 4, 524), ("k", 6, 772), ("x", 4, 1030), ("m", 6, 780), ("m", 4, 785), ("nn", 6, 1036)]
    print("shape  limit  wanted  found  bound    gap      s   how")
    for shape, limit, bar in [*bars, ("v", 3, 692), ("m", 3, 948), ("nn", 3, 1351)]:
        result = find_plan(tessel(shape, 4, limit), 256 if shape == "x" else 128, time_limit_s=30)
        print(
            f"{shape:<7}{limit:>5}{bar:>8}{result.makespan_us:>7}{int(result.bound_us):>7}{result.gap:>7.2%}"
            f"{result.elapsed_s:>7.2f}   {result.how}"
        )


# --- the zero-bubble shape -------------------------------------------------------------------------------------------

COSTS_US = {
    "1:1:1": (10_000, 10_000, 10_000, 0),
    "18.5": (18_500, 18_100, 9_300, 600),
    "29.85": (29_850, 29_770, 18_870, 470),
}


def zero_bubble(
    num_ranks: int, times_us: tuple[int, int, int], memory: float, seed: int, latency_us: int, spread: float = 0.0
) -> Placement:
    """A chain, one stage a rank, F I W; `memory` in what 1F1B's first rank holds."""
    chooser = Random(seed)
    factors = [chooser.uniform(1 - spread, 1 + spread) for _ in range(num_ranks)]
    columns = [[round(us * factor) for factor in factors] for us in times_us]
    costs = Costs(*columns, activation_bytes=2)
    return place(costs, Cluster.uniform(num_ranks, round(2 * memory * num_ranks), latency_us=latency_us))


def fits(timeline: Timeline) -> bool:
    limits = timeline.plan.placement.cluster.limit_bytes
    return all(limit is None or peak <= limit for peak, limit in zip(timeline.peak_memory_bytes, limits, strict=True))


def zb() -> None:
    """Never worse than the zero-bubble family, by span and by makespan."""
    print("costs   ranks  x m  memory   zb span  our span          gap    makespan       ours          gap")
    for (name, (*times, latency)), ranks, each, memory in product(
        COSTS_US.items(), (4, 8, 16, 32), (2, 3), (1, 1.5, 2)
    ):
        placement = zero_bubble(ranks, tuple(times), memory, 0, latency)  # type: ignore[arg-type]
        plans = [schedule(placement, each * ranks) for schedule in (zb_h1, zb_h2, one_f_one_b)]
        family = [timeline for timeline in map(simulate, plans) if fits(timeline)]
        line = f"{name:<8}{ranks:>5}{each:>5}{memory:>8}"
        for objective, theirs in (
            ("span", min(timeline.span_us for timeline in family)),
            ("makespan", min(timeline.makespan_us for timeline in family)),
        ):
            result = find_plan(placement, each * ranks, objective=objective, time_limit_s=15)  # type: ignore[arg-type]
            assert result.value_us <= theirs
            line += (
                f"{theirs:>10}{int(result.value_us):>10}{float(result.value_us / theirs - 1):>8.2%}{result.gap:>7.2%}"
            )
        print(line, flush=True)


# --- tight memory ----------------------------------------------------------------------------------------------------


def two_a_rank(num_ranks: int, limit: int) -> Placement:
    costs = Costs.uniform(2 * num_ranks, 93, 91, 47, activation_bytes=2)
    return wave(costs, Cluster.uniform(num_ranks, limit, latency_us=6))


def tight() -> None:
    found, took_s = steady(two_a_rank(8, 20))
    print(f"8 ranks, limit 20: a micro-batch takes {found}, found in {took_s:.2f} s")
    print("ranks  m  limit  wanted  v_half  v_min  found  bound    gap      s   how")
    for ranks, m, limit, bar in ((8, 16, 20, 9661), (8, 16, 16, 11400), (4, 8, 12, 4500), (4, 8, 8, 5400)):
        placement = two_a_rank(ranks, limit)
        half, least = (simulate(schedule(placement, m)).makespan_us for schedule in (v_half, v_min))
        result = find_plan(placement, m, time_limit_s=60)
        print(
            f"{ranks:>5}{m:>3}{limit:>7}{bar:>8}{half:>8}{least:>7}{result.makespan_us:>7}{int(result.bound_us):>7}"
            f"{result.gap:>7.2%}{result.elapsed_s:>7.1f}   {result.how}",
            flush=True,
        )


def curve() -> None:
    began = time.perf_counter()
    points = find_frontier(two_a_rank(8, 1), time_limit_s=60).points
    print(f"{time.perf_counter() - began:.1f} s:", end=" ")
    print(", ".join(f"{point.limit_bytes} -> {float(point.us_per_microbatch):.0f}" for point in points))


# --- large steps -----------------------------------------------------------------------------------------------------


def large() -> None:
    """64 ranks x 512 micro-batches, 98,304 ops, each stage's times ± 20%."""
    print("memory   first plan: s     gap    within 1 s: gap    after 30 s: gap   to proof: s")
    for memory in (1, 1.25):
        told: list[Progress] = []
        placement = zero_bubble(64, (10_000, 10_000, 10_000), memory, 1, 100, spread=0.2)
        result = find_plan(placement, 512, time_limit_s=30, progress=told.append)
        soon = [one for one in told if one.elapsed_s <= 1]
        proof = f"{result.elapsed_s:.1f}" if result.is_optimal else "-"
        print(
            f"{memory:>6}{told[0].elapsed_s:>17.2f}{told[0].gap:>8.2%}{soon[-1].gap if soon else float('nan'):>19.2%}"
            f"{result.gap:>19.3%}{proof:>15}",
            flush=True,
        )


# --- where a simple heuristic or a longer proof was better ------------------------------------------------------------


def gaps() -> None:
    """The rows of rows.py, and what list scheduling with caps and a climb reaches in a minute (heuristic.py)."""
    print("row                    makespan         bound     gap       s  heuristic   how")
    for row in rows():
        result = find_plan(row.placement, row.num_microbatches, time_limit_s=row.limit_s)
        other_us, _ = climb(row.placement, row.num_microbatches)
        print(
            f"{row.name:<20}{result.makespan_us:>11,}{int(result.bound_us):>14,}{result.gap:>8.2%}"
            f"{result.elapsed_s:>8.1f}{other_us:>11,}   {result.how}",
            flush=True,
        )


SECTIONS: dict[str, Callable[[], None]] = {one.__name__: one for one in (periods, steps, tight, curve, large, zb, gaps)}


def main() -> None:
    wanted = sys.argv[1:] or list(SECTIONS)
    if unknown := set(wanted) - set(SECTIONS):
        sys.exit(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    warm_up()
    for name in wanted:
        print(f"\n== {name}: {(SECTIONS[name].__doc__ or '').splitlines()[0] if SECTIONS[name].__doc__ else ''}")
        SECTIONS[name]()


if __name__ == "__main__":
    main()
