"""A planner of batches by a fixed budget of tokens, with 1F1B: what `rota.Planner` calls in its process."""

from collections.abc import Sequence
from dataclasses import dataclass

from rota import Cluster, Costs, Placement, Plan, SearchError, place, simulate
from rota.schedules import one_f_one_b


@dataclass(frozen=True)
class Budgeted:
    groups: list[list[int]]
    plan: Plan

    @property
    def makespan_us(self) -> int:
        return simulate(self.plan).makespan_us

    @property
    def bound_us(self) -> int:
        return 0


def groups_of(lengths: Sequence[int], samples: Sequence[int], tokens: int) -> list[list[int]]:
    """In the order of the samples, as many as fit into `tokens` once padded to the longest of them."""
    groups: list[list[int]] = []
    longest = 0
    for i in samples:
        if lengths[i] > tokens:
            raise SearchError(f"sample {i} has {lengths[i]} tokens, but {tokens} fit into a micro-batch")
        longest = max(longest, lengths[i])
        if not groups or (len(groups[-1]) + 1) * longest > tokens:
            groups.append([])
            longest = lengths[i]
        groups[-1].append(i)
    return groups


def plan_of(lengths: Sequence[int], groups: list[list[int]], num_ranks: int) -> Plan:
    sizes = [(len(group), max(lengths[i] for i in group)) for group in groups]
    classes = sorted({*sizes})
    cluster = Cluster.uniform(num_ranks)
    placements = [
        place(Costs.uniform(num_ranks, rows * n + 5, 2 * rows * n + 5, boundary_bytes=48 * rows * n), cluster)
        for rows, n in classes
    ]
    placement = Placement.of_classes(placements, [classes.index(size) for size in sizes])
    return one_f_one_b(placement, len(groups))


def plan(lengths: Sequence[int], num_replicas: int, num_ranks: int, tokens: int) -> list[Budgeted]:
    """Each replica gets every so-manieth sample."""
    found = []
    for replica in range(num_replicas):
        groups = groups_of(lengths, range(replica, len(lengths), num_replicas), tokens)
        found.append(Budgeted(groups, plan_of(lengths, groups, num_ranks)))
    return found
