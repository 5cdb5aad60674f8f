"""How near a rehearsed makespan is to the simulated one: random plans, a plan for 32 ranks, larger messages."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import random
import tempfile
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from rota import Cluster, Costs, Kind, Link, Op, Placement, Plan, place
from rota.planning.rehearsal import Rehearsal, rehearse
from rota.profiling.links import measure_link
from rota.schedules import FAMILIES, NAMED

BAR = 0.03
NUM_STEPS = 5
LARGEST_BYTES = 64 * 1024
SHORTEST_US, LONGEST_US = 5_000, 20_000


def this_machines_link() -> Link:
    """As two processes measure it."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(2) as pool:
        store = f"file://{Path(folder, 'store')}"
        return pool.starmap(_measure, [(rank, store) for rank in range(2)], chunksize=1)[0]


def _measure(rank: int, store: str) -> Link:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    return measure_link(0, 1, repeats=51)


def random_plan(seed: int, num_ranks: int, link: Link) -> tuple[str, Plan]:
    """A name, and a plan of random times and sizes: of one family after the other, every third time of no family."""
    rng = random.Random(seed)
    cluster = Cluster((None,) * num_ranks, link)
    num_microbatches = 2 * num_ranks
    if seed % 3 == 0:
        num_stages = num_ranks * rng.randint(1, 2)
        ranks = [rng.randrange(num_ranks) for _ in range(num_stages)]
        return "any order", in_any_order(place(random_costs(rng, num_stages), cluster, ranks), num_microbatches, rng)
    family = FAMILIES[5 * seed % len(FAMILIES)]
    costs = family.adapted(random_costs(rng, num_ranks * family.stages_per_rank))
    return family.name, family(family.place(costs, cluster), num_microbatches)


def random_costs(rng: random.Random, num_stages: int) -> Costs:
    def times() -> tuple[int, ...]:
        return tuple(rng.randint(SHORTEST_US, LONGEST_US) for _ in range(num_stages))

    boundaries = tuple(rng.randrange(LARGEST_BYTES + 1) for _ in range(num_stages - 1))
    return Costs(times(), times(), times(), boundary_bytes=boundaries)


def in_any_order(placement: Placement, num_microbatches: int, rng: random.Random) -> Plan:
    """One op after the other, each a random one of those whose inputs are there, dealt to the ranks."""
    inputs: dict[tuple[int, Kind], set[tuple[int, Kind]]] = {(t.stage, t.kind): set() for t in placement.tasks}
    for edge in placement.edges:
        a, b = placement.tasks[edge.source], placement.tasks[edge.target]
        inputs[b.stage, b.kind].add((a.stage, a.kind))
    left = [Op(*task, m) for task in inputs for m in range(num_microbatches)]
    done: set[Op] = set()
    orders: list[list[Op]] = [[] for _ in range(placement.num_ranks)]
    while left:
        ready = [op for op in left if all(Op(*task, op.microbatch) in done for task in inputs[op.stage, op.kind])]
        op = rng.choice(ready)
        left.remove(op)
        done.add(op)
        for rank in placement.ranks_of(op.stage):
            orders[rank].append(op)
    return Plan(placement, num_microbatches, tuple(map(tuple, orders)))


def tell(name: str, rehearsal: Rehearsal) -> float:
    """One line; returns how far off it was."""
    planned, comparison = rehearsal.planned, rehearsal.comparison
    off = comparison.difference_us / planned.makespan_us
    num_ops = sum(map(len, planned.plan.orders))
    late_us = sum(overhead.late_us for overhead in rehearsal.overheads) / num_ops
    print(
        f"  {name:<28}{planned.makespan_us / 1000:>9.1f}{rehearsal.measured.makespan_us / 1000:>10.1f} ms{off:>+8.2%}"
        f"{comparison.later_arrivals_us / planned.makespan_us:>+10.2%}{comparison.rest_us / planned.makespan_us:>+8.2%}"
        f"{late_us:>9.0f} µs",
        flush=True,
    )
    return off


def tell_random(num_plans: int, link: Link) -> None:
    offs = []
    for seed in range(num_plans):
        num_ranks = (4, 8)[seed % 2]
        name, plan = random_plan(seed, num_ranks, link)
        offs.append(tell(f"{seed}: {name}, {num_ranks} ranks", rehearse(plan, num_steps=NUM_STEPS)))
    within = sum(abs(off) <= BAR for off in offs)
    print(f"  within {BAR:.0%}: {within} of {len(offs)}; worst {max(offs, key=abs):+.2%}, median {median(offs):+.2%}")


def tell_many_ranks(link: Link) -> None:
    costs = Costs.uniform(32, SHORTEST_US, 2 * SHORTEST_US, boundary_bytes=LARGEST_BYTES)
    plan = NAMED["1f1b"](place(costs, Cluster((None,) * 32, link)), 64)
    tell("1f1b, 32 ranks", rehearse(plan, num_steps=3))


def tell_larger(link: Link) -> None:
    for megabytes in (1, 4, 16):
        costs = Costs.uniform(4, SHORTEST_US, 2 * SHORTEST_US, boundary_bytes=megabytes * 1_000_000)
        plan = NAMED["1f1b"](place(costs, Cluster((None,) * 4, link)), 8)
        tell(f"1f1b, 4 ranks, {megabytes} MB", rehearse(plan, num_steps=NUM_STEPS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("random", "many", "larger"))
    parser.add_argument("--plans", type=int, default=20)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    link = this_machines_link()
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}; link: {link.latency_us} µs, {link.bytes_per_us} MB/s"
    )
    print(f"  {'':<28}simulated  rehearsed        off  arrivals    rest  late an op")
    if options.only in (None, "random"):
        tell_random(options.plans, link)
    if options.only in (None, "many"):
        tell_many_ranks(link)
    if options.only in (None, "larger"):
        tell_larger(link)


if __name__ == "__main__":
    main()
