"""The random plans of this benchmark: five ways to order, on 4 and 8 ranks, with uneven stages."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

from rota import Cluster, Costs, Kind, Op, Placement, Plan, place
from rota.profiling.links import SIZES
from rota.schedules import NAMED
from rota.search import find_plan

KB, MB = 1_000, 1_000_000
#: By class: the smallest and the largest boundary, and the shortest and the longest time of a task, in µs.
CLASSES = {
    "up to 1 MB": (1 * KB, 1 * MB, 5_000, 20_000),
    "4 MB": (4 * MB, 4 * MB, 5_000, 20_000),
    "16 MB": (16 * MB, 16 * MB, 15_000, 45_000),
}
MANY = "32 ranks x 64"
FAMILIES = ("1f1b", "zb_h1", "interleaved_1f1b", "v_half", "searched")
_MIDDLE_US = 10_000  # of an op while links are measured: as long as ranks rest between messages of the plans
_NOMINAL_S = 2.0  # of a search, deterministic


class Case(NamedTuple):
    """A plan's number, class and ranks; what it is follows from these and from the cluster."""

    seed: int
    sizes: str
    num_ranks: int

    @property
    def key(self) -> str:
        """Its name in the file of results."""
        return f"{self.sizes}, {self.seed}"


def cases(num_plans: int) -> list[Case]:
    """All cases; a call that is ended early has begun with every class."""
    return [Case(0, MANY, 32), *(Case(seed, sizes, (4, 8)[seed % 2]) for seed in range(num_plans) for sizes in CLASSES)]


def plan_of(case: Case, cluster: Cluster) -> tuple[str, Plan]:
    """A case's name and its plan."""
    if case.sizes == MANY:
        costs = Costs.uniform(case.num_ranks, 5_000, 10_000, boundary_bytes=64 * KB)
        return "1f1b, 32 ranks x 64", NAMED["1f1b"](NAMED["1f1b"].place(costs, cluster), 64)
    rng = random.Random(1000 * [*CLASSES].index(case.sizes) + case.seed)
    how = FAMILIES[case.seed // 2 % len(FAMILIES)]
    family = NAMED[how if how != "searched" else rng.choice(("zb_h1", "interleaved_1f1b", "v_half"))]
    num_microbatches = rng.randint(case.num_ranks, 3 * case.num_ranks)
    costs = family.adapted(random_costs(rng, case.sizes, case.num_ranks * family.stages_per_rank))
    placement = family.place(costs, cluster)
    plan = family(placement, num_microbatches) if how != "searched" else _searched(placement, num_microbatches)
    return f"{how}, {case.num_ranks} ranks x {num_microbatches}", plan


def random_costs(rng: random.Random, sizes: str, num_stages: int) -> Costs:
    """Uneven stages: every time and size by itself. The first stage's input needs no gradient, so its I takes 0 µs."""
    least_bytes, most_bytes, shortest_us, longest_us = CLASSES[sizes]

    def times() -> tuple[int, ...]:
        return tuple(rng.randint(shortest_us, longest_us) for _ in range(num_stages))

    boundaries = tuple(rng.randint(least_bytes, most_bytes) for _ in range(num_stages - 1))
    return Costs(times(), (0, *times()[1:]), times(), boundary_bytes=boundaries)


def one_at_a_time(num_ranks: int) -> Plan:
    """A chain that visits each rank several times, with messages of all sizes of links, and a single micro-batch."""
    num_stages = len(SIZES) * num_ranks + 1
    boundaries = tuple(SIZES[stage // num_ranks] for stage in range(num_stages - 1))
    costs = Costs.uniform(num_stages, _MIDDLE_US, _MIDDLE_US)
    ranks = [stage % num_ranks for stage in range(num_stages)]
    placement = place(replace(costs, boundary_bytes=boundaries), Cluster.uniform(num_ranks), ranks)
    ops = [Op(stage, Kind.F, 0) for stage in range(num_stages)] + [
        Op(stage, Kind.B, 0) for stage in reversed(range(num_stages))
    ]
    orders = (tuple(op for op in ops if ranks[op.stage] == rank) for rank in range(num_ranks))
    return Plan(placement, 1, tuple(orders))


def _searched(placement: Placement, num_microbatches: int) -> Plan:
    return find_plan(placement, num_microbatches, time_limit_s=_NOMINAL_S, deterministic=True).plan
