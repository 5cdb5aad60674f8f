"""Random clusters, costs, placements and valid plans, as small and as odd as the nouns allow."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

from hypothesis import strategies as st

from rota.costs import Cluster, Costs, Link
from rota.placement import Edge, Placement, StepEnd
from rota.placing import place
from rota.plan import Plan
from rota.tasks import Kind, Op, Task

Chooser = random.Random

MOST_RANKS = 4
MOST_TASKS = 8

_times = st.integers(0, 9)
_sizes = st.integers(0, 20)
_rates = st.none() | st.integers(1, 5)

links = st.builds(Link, st.integers(0, 5), _rates)
ops = st.builds(Op, st.integers(0, 10**9 - 1), st.sampled_from(Kind), st.integers(0, 10**9 - 1))


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """1 to 4 ranks without limits; some pairs have a link of their own."""
    num_ranks = draw(st.integers(1, MOST_RANKS))
    ranks = st.integers(0, num_ranks - 1)
    special = draw(st.lists(st.tuples(ranks, ranks, links), max_size=3))
    return Cluster((None,) * num_ranks, draw(links), tuple(special))


def subsets(num_ranks: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Usually one rank, sometimes several in any order."""
    ranks = st.integers(0, num_ranks - 1)
    one = ranks.map(lambda rank: (rank,))
    return one | one | st.lists(ranks, min_size=1, max_size=num_ranks, unique=True).map(tuple)


def forward_pairs(count: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Edges of a DAG: pairs a < b out of `count`; none, some or many, a pair perhaps twice."""
    if count < 2:
        return st.just([])
    pairs = [(a, b) for b in range(count) for a in range(b)]
    return st.lists(st.sampled_from(pairs), max_size=2 * count)


@st.composite
def costs(draw: st.DrawFn, most_stages: int = 4) -> Costs:
    """A random DAG of stages (perhaps none joined, perhaps a chain); backward whole or split."""
    n = draw(st.integers(1, most_stages))
    edges = draw(st.none() | forward_pairs(n))
    num_edges = n - 1 if edges is None else len(edges)
    times, sizes = st.tuples(*[_times] * n), st.tuples(*[_sizes] * n)
    edge_sizes = _sizes | st.tuples(*[_sizes] * num_edges)
    held = draw(sizes)
    split = draw(st.booleans())
    return Costs(
        forward_us=draw(times),
        backward_us=draw(times),
        weight_us=draw(times) if split else None,
        activation_bytes=held,
        input_frees_bytes=draw(st.none() | st.tuples(*[st.integers(0, most) for most in held])),
        boundary_bytes=draw(edge_sizes),
        gradient_bytes=draw(st.none() | edge_sizes),
        forward_peak_bytes=draw(_sizes),
        backward_peak_bytes=draw(sizes),
        weight_peak_bytes=draw(_sizes),
        static_bytes=draw(sizes),
        reduce_us=draw(st.just(0) | times),
        optimizer_us=draw(st.just(0) | times),
        edges=None if edges is None else tuple(edges),
    )


@st.composite
def placed(draw: st.DrawFn) -> Placement:
    """What `place` makes of random costs, stages anywhere."""
    given, cluster = draw(costs()), draw(clusters())
    ranks = draw(st.lists(subsets(cluster.num_ranks), min_size=given.num_stages, max_size=given.num_stages))
    return place(given, cluster, ranks)


@st.composite
def raw(draw: st.DrawFn) -> Placement:
    """A DAG of tasks that mirrors nothing: any kinds, any ranks, any sizes; step ends where the stage is at home."""
    cluster = draw(clusters())
    count = draw(st.integers(1, MOST_TASKS))
    names = st.tuples(st.integers(0, 5), st.sampled_from(Kind))
    numbers = st.tuples(_times, st.integers(-20, 20), _sizes)
    tasks = [
        Task(stage, kind, draw(subsets(cluster.num_ranks)), *draw(numbers))
        for stage, kind in draw(st.lists(names, min_size=count, max_size=count, unique=True))
    ]
    edges = [Edge(a, b, draw(_sizes)) for a, b in draw(forward_pairs(len(tasks)))]
    stages = sorted({task.stage for task in tasks})
    ends = draw(st.lists(st.tuples(st.sampled_from(stages), _times, _times), max_size=2, unique_by=lambda end: end[0]))
    static = draw(st.just(()) | st.tuples(*[_sizes] * cluster.num_ranks))
    return Placement(tuple(tasks), tuple(edges), cluster, static, tuple(StepEnd(*end) for end in ends))


placements = placed() | raw()


def every_op(placement: Placement, num_microbatches: int) -> list[Op]:
    """All ops of a step, micro-batch by micro-batch, in the placement's order of tasks."""
    return [
        Op(task.stage, task.kind, m)
        for m in range(num_microbatches)
        for task in placement.tasks
        if m in placement.microbatches(task.stage, num_microbatches)
    ]


def read_by(placement: Placement, op: Op) -> list[Op]:
    """The ops whose outputs `op` reads."""
    target = placement.index[op.stage, op.kind]
    sources = [placement.tasks[edge.source] for edge in placement.edges if edge.target == target]
    return [Op(task.stage, task.kind, op.microbatch) for task in sources]


def linear_extension(placement: Placement, num_microbatches: int, chooser: Chooser, in_order: bool) -> list[Op]:
    """All ops of a step so that each comes after what it reads; `in_order`: a task's micro-batches rise."""
    waiting = {op: set(read_by(placement, op)) for op in every_op(placement, num_microbatches)}
    if in_order:
        for op, before in waiting.items():
            earlier = op._replace(microbatch=op.microbatch - placement.num_streams)
            if earlier in waiting:
                before.add(earlier)
    done: list[Op] = []
    while waiting:
        op = chooser.choice([op for op, before in waiting.items() if not before])
        del waiting[op]
        for before in waiting.values():
            before.discard(op)
        done.append(op)
    return done


def deal(placement: Placement, num_microbatches: int, sequence: Iterable[Op]) -> Plan:
    """Each rank does its ops in the order of `sequence`."""
    orders: list[list[Op]] = [[] for _ in range(placement.num_ranks)]
    for op in sequence:
        for rank in placement.tasks[placement.index[op.stage, op.kind]].ranks:
            orders[rank].append(op)
    return Plan(placement, num_microbatches, tuple(map(tuple, orders)))


@st.composite
def plans(draw: st.DrawFn, placements: st.SearchStrategy[Placement] = placements, most_microbatches: int = 6) -> Plan:
    """A valid plan: any order that contradicts no dependency."""
    placement = draw(placements)
    num_microbatches = draw(st.integers(1, most_microbatches))
    chooser = Chooser(draw(st.integers(0, 2**16)))
    sequence = linear_extension(placement, num_microbatches, chooser, in_order=draw(st.booleans()))
    return deal(placement, num_microbatches, sequence)


def with_limits(plan: Plan, limits: Iterable[int | None]) -> Plan:
    """The same plan on ranks with these limits."""
    cluster = replace(plan.placement.cluster, limit_bytes=tuple(limits))
    return replace(plan, placement=replace(plan.placement, cluster=cluster))
