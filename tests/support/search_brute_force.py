"""Tiny random placements, and the best plan for them found by trying all."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from rota import Cluster, Costs, Edge, Kind, Link, Op, Placement, Plan, StepEnd, Task, bidirectional, place, simulate
from rota.core.timeline import Timeline
from rota.search.problem import Problem
from support.core_strategies import ops_before


def tiny_placement(chooser: random.Random, carries: bool = False) -> Placement:
    """A DAG of 2 to 4 tasks on up to 3 ranks, some on several, some without length; edges have bytes if `carries`."""
    num_ranks = chooser.randint(1, 3)
    names = [(stage, kind) for stage in range(3) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)]
    tasks = []
    for stage, kind in chooser.sample(names, chooser.randint(2, 4)):
        ranks = chooser.sample(range(num_ranks), chooser.choice((1, 1, 1, min(2, num_ranks), num_ranks)))
        held, peak = chooser.randint(-2, 3), chooser.choice((0, 0, 0, 1, 2))
        tasks.append(Task(stage, kind, tuple(ranks), chooser.choice((0, 0, 1, 2, 3, 5)), held, peak))
    pairs = [(a, b) for b in range(len(tasks)) for a in range(b)]
    pairs = [pair for pair in pairs if chooser.random() < 0.5]
    edges = [Edge(a, b, chooser.choice((0, 1, 2, 3)) if carries else 0) for a, b in pairs]
    limits = [chooser.choice((None, chooser.randint(2, 8))) for _ in range(num_ranks)]
    stages = sorted({task.stage for task in tasks})
    ends = chooser.sample(stages, chooser.choice((0, 0, 1, len(stages))))
    step_ends = [StepEnd(stage, chooser.randint(0, 3), chooser.randint(0, 3)) for stage in ends]
    cluster = Cluster(tuple(limits), Link(latency_us=chooser.choice((0, 0, 1, 3))))
    return Placement(tuple(tasks), tuple(edges), cluster, step_ends=tuple(step_ends))


def tiny_step(chooser: random.Random) -> tuple[Placement, int]:
    """A placement without limits, and a number of micro-batches: chains, shared stages, split backwards, or any DAG."""
    if chooser.random() < 0.3:
        placement = tiny_placement(chooser, carries=True)
        cluster = replace(placement.cluster, limit_bytes=(None,) * placement.num_ranks)
        return replace(placement, cluster=cluster), chooser.choice((1, 2, 2, 3))
    num_ranks, num_stages = chooser.choice((1, 2, 2, 2, 3)), chooser.choice((1, 2, 2, 3))
    cluster = Cluster((None,) * num_ranks, Link(chooser.choice((0, 0, 1, 3))))

    def some(*values: int) -> tuple[int, ...]:
        return tuple(chooser.choice(values) for _ in range(num_stages))

    held = some(2, 2, 3, 0)
    pairs = tuple((a, b) for a in range(num_stages) for b in range(a + 1, num_stages))
    costs = Costs(
        some(0, 1, 2, 5),
        some(1, 2, 3, 6),
        some(0, 1, 2, 4) if chooser.random() < 0.4 else None,
        activation_bytes=held,
        input_frees_bytes=tuple(chooser.randint(0, size) for size in held),
        forward_peak_bytes=some(0, 0, 1),
        weight_peak_bytes=some(0, 0, 1),
        boundary_bytes=chooser.choice((0, 0, 1)),
        reduce_us=some(0, 0, 4),
        optimizer_us=some(0, 0, 3),
        edges=None if chooser.random() < 0.6 else pairs[:2],
    )
    if chooser.random() < 0.15 and costs.edges is None and num_stages == num_ranks > 1:
        return bidirectional(costs, cluster), 2
    ranks = [*range(num_ranks)] * 3 + [tuple(range(num_ranks))]
    return place(costs, cluster, [chooser.choice(ranks) for _ in range(num_stages)]), chooser.choice((1, 2, 3, 4))


def limited_steps(seed: int, most: int) -> list[tuple[Problem, list[Timeline]]]:
    """A tiny step without limits, with the tightest, those of a random plan, and loose ones; and all plans that fit."""
    chooser = random.Random(seed)
    placement, num_microbatches = tiny_step(chooser)
    timelines = [*map(simulate, every_plan(placement, num_microbatches, most, in_order=True))]
    if not timelines:
        return []
    tightest = min(timelines, key=lambda timeline: (sum(timeline.peak_memory_bytes), timeline.makespan_us))
    peaks = [timeline.peak_memory_bytes for timeline in (tightest, chooser.choice(timelines))]
    every_peak = zip(*(timeline.peak_memory_bytes for timeline in timelines), strict=True)
    steps = [(Problem(placement, num_microbatches), timelines)]
    for limits in (*peaks, tuple(max(of_rank) + 2 for of_rank in every_peak)):
        limited = replace(placement, cluster=replace(placement.cluster, limit_bytes=limits))
        fitting = [t for t in timelines if all(a <= b for a, b in zip(t.peak_memory_bytes, limits, strict=True))]
        steps.append((Problem(limited, num_microbatches), fitting))
    return steps


def every_plan(placement: Placement, num_microbatches: int, most: int = 400, *, in_order: bool = False) -> list[Plan]:
    """All plans that can be carried out, memory apart; empty if there are more than `most`.

    `in_order`: each task's micro-batches rise; else they come in any order.
    """
    before = ops_before(placement, num_microbatches, in_order)
    orders: dict[tuple[tuple[Op, ...], ...], frozenset[Op]] = {((),) * placement.num_ranks: frozenset()}
    for _ in before:
        longer = {}
        for rows, done in orders.items():
            for op, earlier in before.items():
                if op not in done and earlier <= done:
                    ranks = placement.tasks[placement.index[op.stage, op.kind]].ranks
                    more = tuple((*row, op) if rank in ranks else row for rank, row in enumerate(rows))
                    longer[more] = done | {op}
        orders = longer
        if len(orders) > most:
            return []
    return [Plan(placement, num_microbatches, rows) for rows in orders]


class Best(NamedTuple):
    """The least of all plans that fit."""

    makespan_us: int
    span_us: int
    fitting: list[Plan]


class Case(NamedTuple):
    placement: Placement
    num_microbatches: int
    best: Best | None


def best_of(plans: list[Plan]) -> Best | None:
    """None if none fits."""
    limits = plans[0].placement.cluster.limit_bytes
    fitting = []
    for timeline in map(simulate, plans):
        if all(limit is None or peak <= limit for peak, limit in zip(timeline.peak_memory_bytes, limits, strict=True)):
            fitting.append(timeline)
    if not fitting:
        return None
    in_order = [timeline.plan for timeline in fitting if _is_in_order(timeline.plan)]
    return Best(min(t.makespan_us for t in fitting), min(t.span_us for t in fitting), in_order)


def _is_in_order(plan: Plan) -> bool:
    rows = [[op for op in order if op[:2] == task] for order in plan.orders for task in {op[:2] for op in order}]
    return all(row == sorted(row, key=lambda op: op.microbatch) for row in rows)


def tiny_cases(count: int, seed: int, carries: bool = False) -> Iterator[Case]:
    """`count` of them, with more than one plan each; `carries`: transfers hold memory."""
    chooser = random.Random(seed)
    while count:
        placement, num_microbatches = tiny_placement(chooser, carries), chooser.randint(1, 4)
        plans = every_plan(placement, num_microbatches)
        if len(plans) > 1:
            count -= 1
            yield Case(placement, num_microbatches, best_of(plans))
