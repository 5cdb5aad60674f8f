"""Random clusters, costs, placements and valid plans, as small and as odd as the nouns allow.

Each strategy is made once: to look into a new one takes Hypothesis longer than to draw from it.
"""

import random
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import TypeVar

from hypothesis import strategies as st

from rota import Costs, Edge, Kind, Op, Placement, Plan, StepEnd, Task, Transfer, place
from rota.core.cluster import AllReduceTimes, Cluster, Link, SharedLink

Chooser = random.Random
Drawn = TypeVar("Drawn")

MOST_RANKS = 4
MOST_TASKS = 8

_times = st.integers(0, 9)
_sizes = st.integers(0, 20)
_rates = st.none() | st.integers(1, 5)
_computing = st.sampled_from([kind for kind in Kind if not kind.is_copy])
_names = st.tuples(st.integers(0, 5), _computing)
_numbers = st.tuples(_times, st.integers(-20, 20), _sizes)

links = st.builds(Link, st.integers(0, 5), _rates)
ops = st.builds(Op, st.integers(0, 10**9 - 1), st.sampled_from(Kind), st.integers(0, 10**9 - 1))

between = cache(st.integers)


@cache
def tuples_of(entries: st.SearchStrategy[Drawn], count: int) -> st.SearchStrategy[tuple[Drawn, ...]]:
    return st.tuples(*[entries] * count)


@cache
def either(otherwise: Drawn, entries: st.SearchStrategy[Drawn]) -> st.SearchStrategy[Drawn]:
    return st.just(otherwise) | entries


@cache
def _links_between(num_ranks: int, wired: bool) -> st.SearchStrategy[list[tuple[int, int, Link]]]:
    ranks = between(0, num_ranks - 1)
    return st.lists(st.tuples(ranks, ranks, links), max_size=3)


@cache
def _shared_links(num_ranks: int) -> st.SearchStrategy[list[SharedLink]]:
    side = st.lists(between(0, num_ranks - 1), min_size=1, max_size=num_ranks, unique=True).map(tuple)
    names = st.sampled_from(("host a", "network card", "switch"))
    return st.lists(st.builds(SharedLink, names, st.integers(1, 6), side, side), max_size=3)


@cache
@st.composite
def clusters(draw: st.DrawFn, wired: bool = False) -> Cluster:
    """1 to 4 ranks without limits; some pairs have a link of their own.

    `wired`: pairs may share links, and sums over ranks may be measured.
    """
    num_ranks = draw(between(1, MOST_RANKS))
    special = draw(_links_between(num_ranks, wired))
    if not wired:
        return Cluster((None,) * num_ranks, draw(links), tuple(special))
    shared = draw(_shared_links(num_ranks))
    numbers = [n for n in range(2, num_ranks + 1) if draw(st.booleans())]
    sums = tuple(AllReduceTimes(n, ((draw(between(1, 9)), 5), (10, draw(between(5, 9))))) for n in numbers)
    return Cluster((None,) * num_ranks, draw(links), tuple(special), tuple(shared), sums)


@cache
def subsets(num_ranks: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Usually one rank, sometimes several in any order."""
    ranks = between(0, num_ranks - 1)
    single = ranks.map(lambda rank: (rank,))
    return single | single | st.lists(ranks, min_size=1, max_size=num_ranks, unique=True).map(tuple)


@cache
def forward_pairs(count: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Edges of a DAG: pairs a < b out of `count`; none, some or many, a pair perhaps twice."""
    if count < 2:
        return st.just([])
    pairs = [(a, b) for b in range(count) for a in range(b)]
    return st.lists(st.sampled_from(pairs), max_size=2 * count)


@cache
@st.composite
def costs(draw: st.DrawFn, most_stages: int = 4) -> Costs:
    """A random DAG of stages (perhaps none joined, perhaps a chain); backward whole or split."""
    n = draw(between(1, most_stages))
    edges = draw(either(None, forward_pairs(n)))
    num_edges = n - 1 if edges is None else len(edges)
    times, sizes = tuples_of(_times, n), tuples_of(_sizes, n)
    edge_sizes = _one_or_each(num_edges)
    held = draw(sizes)
    split, frees = draw(st.booleans()), draw(st.booleans())
    return Costs(
        forward_us=draw(times),
        backward_us=draw(times),
        weight_us=draw(times) if split else None,
        activation_bytes=held,
        input_frees_bytes=tuple(draw(between(0, most)) for most in held) if frees else None,
        boundary_bytes=draw(edge_sizes),
        gradient_bytes=draw(either(None, edge_sizes)),
        forward_peak_bytes=draw(_sizes),
        backward_peak_bytes=draw(sizes),
        weight_peak_bytes=draw(_sizes),
        static_bytes=draw(sizes),
        reduce_us=draw(either(0, times)),
        optimizer_us=draw(either(0, times)),
        edges=None if edges is None else tuple(edges),
    )


@cache
def _one_or_each(num_edges: int) -> st.SearchStrategy[int | tuple[int, ...]]:
    return _sizes | tuples_of(_sizes, num_edges)


@cache
@st.composite
def placed(draw: st.DrawFn, wired: bool = False) -> Placement:
    """What `place` makes of random costs, stages anywhere; `wired`: some offload a part of what they keep."""
    stage_costs, cluster = draw(costs()), draw(clusters(wired))
    if wired and draw(st.booleans()):
        cluster = cluster.with_host_links(draw(between(1, 6)), draw(between(1, MOST_RANKS)))
        copied = tuple(draw(between(0, most)) for most in stage_costs.kept_bytes)
        stage_costs = replace(stage_costs, offload_bytes=copied)
    return place(stage_costs, cluster, draw(tuples_of(subsets(cluster.num_ranks), stage_costs.num_stages)))


@cache
def _distinct_names(count: int) -> st.SearchStrategy[list[tuple[int, Kind]]]:
    return st.lists(_names, min_size=count, max_size=count, unique=True)


@cache
def _step_ends(stages: tuple[int, ...]) -> st.SearchStrategy[list[tuple[int, int, int]]]:
    end = st.tuples(st.sampled_from(stages), _times, _times)
    return st.lists(end, max_size=2, unique_by=lambda end: end[0])


@cache
@st.composite
def raw(draw: st.DrawFn, wired: bool = False) -> Placement:
    """A DAG of tasks that mirrors nothing: any kinds, any ranks, any sizes; step ends where the stage is at home."""
    cluster = draw(clusters(wired))
    names = draw(_distinct_names(draw(between(1, MOST_TASKS))))
    ranks = subsets(cluster.num_ranks)
    tasks = [Task(stage, kind, draw(ranks), *draw(_numbers)) for stage, kind in names]
    edges = [Edge(a, b, draw(_sizes)) for a, b in draw(forward_pairs(len(tasks)))]
    ends = draw(_step_ends(tuple(sorted({task.stage for task in tasks}))))
    static = draw(either((), tuples_of(_sizes, cluster.num_ranks)))
    return Placement(tuple(tasks), tuple(edges), cluster, static, tuple(StepEnd(*end) for end in ends))


placements = placed() | raw()
wired_placements = placed(wired=True) | raw(wired=True)


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


def chunks_before(placement: Placement, op: Op) -> list[Op]:
    """The same op of the chunks that come before: earlier ones of the sample for F, later ones for B and I."""
    sign = {Kind.F: 1, Kind.B: -1, Kind.I: -1}.get(op.kind, 0)
    samples = placement.sample_of
    others = [m for m, sample in enumerate(samples) if sample == samples[op.microbatch]]
    return [op._replace(microbatch=m) for m in others if (op.microbatch - m) * sign > 0]


def ops_before(placement: Placement, num_microbatches: int, in_order: bool = False) -> dict[Op, set[Op]]:
    """For each op of a step what has to come before it; `in_order`: a task's micro-batches rise."""
    before = {
        op: {*read_by(placement, op), *chunks_before(placement, op)} for op in every_op(placement, num_microbatches)
    }
    if in_order and not placement.sample_of:
        for op, earlier in before.items():
            earlier |= {op._replace(microbatch=op.microbatch - placement.num_components)} & before.keys()
    return before


def linear_extension(placement: Placement, num_microbatches: int, chooser: Chooser, in_order: bool) -> list[Op]:
    """All ops of a step so that each comes after what it reads; `in_order`: a task's micro-batches rise."""
    waiting = ops_before(placement, num_microbatches, in_order)
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


@cache
@st.composite
def plans(draw: st.DrawFn, placements: st.SearchStrategy[Placement] = placements, most_microbatches: int = 6) -> Plan:
    """A valid plan: any order that contradicts no dependency."""
    placement = draw(placements)
    num_microbatches = draw(between(1, most_microbatches))
    chooser = Chooser(draw(between(0, 2**16)))
    sequence = linear_extension(placement, num_microbatches, chooser, in_order=draw(st.booleans()))
    return deal(placement, num_microbatches, sequence)


@cache
@st.composite
def differing(draw: st.DrawFn, wired: bool = False, most_microbatches: int = 5) -> Placement:
    """A placement whose micro-batches differ, with 1 to 3 classes; figures may still be the same for all.

    Some micro-batches may be chunks of samples.
    """
    placement = draw(wired_placements if wired else placements)
    num_classes = draw(between(1, 3))
    least = 1 if wired else 0  # transfers on shared links have bytes in all classes
    tasks, edges = placement.tasks, placement.edges
    class_of = draw(st.lists(between(0, num_classes - 1), min_size=1, max_size=most_microbatches))
    streams = placement.num_components
    samples = draw(st.lists(between(0, 2), min_size=len(class_of), max_size=len(class_of)) | st.none())
    sample_of = [m % streams + streams * sample for m, sample in enumerate(samples or ())]

    def drawn() -> Placement:
        copied = {task.stage: draw(between(1, 20)) for task in tasks if task.kind is Kind.O}
        numbers = {
            task: (0, copied[task.stage] * (1 if task.kind is Kind.L else -1)) if task.kind.is_copy else draw(_numbers)
            for task in tasks
        }
        of_class = tuple(Task(task.stage, task.kind, task.ranks, *numbers[task]) for task in tasks)
        sizes = [
            copied[tasks[edge.source].stage] if placement.is_copy(edge) else draw(between(least, 20)) for edge in edges
        ]
        resized = tuple(edge._replace(num_bytes=size) for edge, size in zip(edges, sizes, strict=True))
        return replace(placement, tasks=of_class, edges=resized)

    return Placement.of_classes([drawn() for _ in range(num_classes)], class_of, sample_of)


@cache
@st.composite
def differing_plans(draw: st.DrawFn, wired: bool = False, most_microbatches: int = 5) -> Plan:
    """A valid plan of micro-batches that differ: any order that contradicts no dependency, and any order of service."""
    placement = draw(differing(wired, most_microbatches))
    chooser = Chooser(draw(between(0, 2**16)))
    count = placement.given_microbatches or draw(between(1, most_microbatches))
    plan = deal(placement, count, linear_extension(placement, count, chooser, in_order=draw(st.booleans())))
    return plan if not wired or draw(st.booleans()) else served_in_any_order(plan, chooser)


@cache
@st.composite
def wired_plans(draw: st.DrawFn, most_microbatches: int = 5) -> Plan:
    """A valid plan on a wired cluster; its orders of service are not given, or any that have no cycle."""
    plan = draw(plans(wired_placements, most_microbatches))
    kind, seed = draw(st.sampled_from(("first come", "any", "any"))), draw(between(0, 2**16))
    return plan if kind == "first come" else served_in_any_order(plan, Chooser(seed))


def served_in_any_order(plan: Plan, chooser: Chooser) -> Plan:
    """The plan with an order of service in which each transfer comes somewhere between its ops in an order of all."""
    position: dict[Op | Transfer, float] = {}
    for i, node in enumerate(plan.earliest.sequence):
        if node < plan.num_ops:
            position[plan.op(node)] = i
    orders: list[list[tuple[float, Transfer]]] = [[] for _ in plan.placement.cluster.shared]
    for r, route in enumerate(plan.placement.routes):
        for m in plan.microbatches_on(r):
            transfer = plan.placement.transfer(r, m)
            at = chooser.uniform(position[transfer.source], position[transfer.target])
            for shared in route.shared:
                orders[shared].append((at, transfer))
    return replace(plan, service_orders=tuple(tuple(t for _, t in sorted(order)) for order in orders))


def with_limits(plan: Plan, limits: Iterable[int | None]) -> Plan:
    """The same plan on ranks with these limits."""
    cluster = replace(plan.placement.cluster, limit_bytes=tuple(limits))
    return replace(plan, placement=replace(plan.placement, cluster=cluster))
