"""Random stage graphs, placements and orders, by seed: as odd as `check` lets them be."""

import random
from dataclasses import replace

from rota import Cluster, Costs, Edge, Kind, Link, Placement, Plan, SharedLink, place
from support.core_strategies import deal, linear_extension, served_in_any_order

Edges = list[tuple[int, int]]


def random_edges(rng: random.Random, num_stages: int) -> Edges:
    """A chain, or a connected DAG with one sink; stages are numbered in any order."""
    label = list(range(num_stages))
    rng.shuffle(label)
    pairs = {(a, a + 1) for a in range(num_stages - 1)}
    if rng.random() < 0.75:
        pairs = {(a, b) for b in range(1, num_stages) for a in rng.sample(range(b), rng.randint(0, min(b, 2)))}
        fed = {a for a, _ in pairs}
        pairs |= {(a, num_stages - 1) for a in range(num_stages - 1) if a not in fed}
    edges = [(label[a], label[b]) for a, b in sorted(pairs)]
    rng.shuffle(edges)
    return edges


def with_whole_backwards(placement: Placement, stages: set[int]) -> Placement:
    """B instead of I and W on some stages."""
    kept = [i for i, task in enumerate(placement.tasks) if not (task.kind is Kind.W and task.stage in stages)]
    new = {old: i for i, old in enumerate(kept)}
    tasks = [placement.tasks[i] for i in kept]
    tasks = [replace(t, kind=Kind.B) if t.kind is Kind.I and t.stage in stages else t for t in tasks]
    edges = tuple(Edge(new[a], new[b], size) for a, b, size in placement.edges if a in new and b in new)
    return replace(placement, tasks=tuple(tasks), edges=edges)


def random_costs(rng: random.Random, kinds: random.Random, num_stages: int) -> Costs:
    """Small times; some stages are recomputed."""
    return Costs(
        forward_us=tuple(rng.randint(0, 3) for _ in range(num_stages)),
        backward_us=tuple(rng.randint(0, 3) for _ in range(num_stages)),
        weight_us=tuple(kinds.randint(0, 3) for _ in range(num_stages)),
        recompute_us=tuple(kinds.choice([1, None, None]) for _ in range(num_stages)),
    )


def random_chain_plan(seed: int, num_ranks: int, num_stages: int, num_microbatches: int) -> Plan:
    """A valid plan for a chain: each rank has as many stages as the others, and does its ops in any order."""
    rng, kinds = random.Random(seed), random.Random(f"kinds {seed}")
    ranks = [stage % num_ranks for stage in range(num_stages)]
    rng.shuffle(ranks)
    placement = place(random_costs(rng, kinds, num_stages), Cluster.uniform(num_ranks), ranks)
    placement = with_whole_backwards(placement, {stage for stage in range(num_stages) if kinds.random() < 0.5})
    return deal(placement, num_microbatches, linear_extension(placement, num_microbatches, rng, in_order=False))


def random_plan(seed: int, num_ranks: int) -> tuple[Edges, Plan]:
    """The edges between the stages and a valid plan for them: stages anywhere, micro-batches in any order.

    In every third plan some stages are on several ranks.
    """
    rng, kinds = random.Random(seed), random.Random(f"kinds {seed}")
    num_stages = rng.randint(1, 8)
    edges = random_edges(rng, num_stages)
    costs = random_costs(rng, kinds, num_stages)
    cluster = Cluster.uniform(num_ranks, latency_us=rng.choice([0, 0, 1, 5]))
    ranks = [rng.sample(range(num_ranks), 1) for _ in range(num_stages)]
    if seed % 3 == 0:
        ranks = [rng.sample(range(num_ranks), rng.randint(1, num_ranks)) for _ in ranks]
    placement = place(costs, cluster, ranks, edges)
    whole = {stage for stage in range(num_stages) if kinds.random() < 0.5}
    placement = with_whole_backwards(placement, whole)
    if rng.random() < 0.1:
        placement = placement.forward_only()
    num_microbatches = rng.randint(1, 6)
    sequence = linear_extension(placement, num_microbatches, rng, in_order=rng.random() < 0.3)
    return edges, deal(placement, num_microbatches, sequence)


def with_random_wires(plan: Plan, seed: int) -> Plan:
    """The plan with messages of random sizes, which share links, served in a random order."""
    rng = random.Random(f"wires {seed}")
    ranks = range(plan.num_ranks)

    def some() -> tuple[int, ...]:
        return tuple(rng.sample(ranks, rng.randint(1, plan.num_ranks)))

    shared = tuple(SharedLink(f"link {i}", rng.randint(1, 4), some(), some()) for i in range(rng.randint(1, 3)))
    link = Link(rng.randint(0, 3), rng.choice([None, 2]))
    cluster = replace(plan.placement.cluster, link=link, shared=shared)
    edges = tuple(edge._replace(num_bytes=rng.choice([0, 3, 10])) for edge in plan.placement.edges)
    plan = replace(plan, placement=replace(plan.placement, cluster=cluster, edges=edges))
    return served_in_any_order(plan, rng) if rng.random() < 0.7 else plan
