"""Bounds are proofs: never above the best of all orders; and where the best is known, as high as it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest

from rota import schedules
from rota.core.cluster import Cluster, Link
from rota.core.costs import Costs
from rota.core.placement import Placement
from rota.core.placing import bidirectional, place, wave
from rota.core.plan import Plan
from rota.core.simulation import simulate
from rota.core.tasks import Edge, Kind, Op, StepEnd, Task
from rota.search import bounds
from rota.search.problem import Problem
from support.sampling import IS_WHOLE, some
from support.tessel_shapes import tessel

OBJECTIVES = ("makespan", "span")


def every_plan(placement: Placement, num_microbatches: int, most: int) -> Iterator[Plan]:
    """All orders that contradict no dependency, each task's micro-batches rising; none if over `most`."""
    batches = [list(placement.microbatches(task.stage, num_microbatches)) for task in placement.tasks]
    before = [[edge.source for edge in placement.edges if edge.target == t] for t in range(len(placement.tasks))]
    empty: tuple[tuple[Op, ...], ...] = ((),) * placement.num_ranks
    seen = {empty}
    todo = [(empty, (0,) * len(placement.tasks))]
    found = []
    while todo:
        orders, done = todo.pop()
        if sum(done) == sum(map(len, batches)):
            found.append(Plan(placement, num_microbatches, orders))
        for t, task in enumerate(placement.tasks):
            k = done[t]
            if k < len(batches[t]) and all(done[source] > k for source in before[t]):
                op = Op(task.stage, task.kind, batches[t][k])
                longer = tuple((*row, op) if rank in task.ranks else row for rank, row in enumerate(orders))
                if longer not in seen:
                    seen.add(longer)
                    todo.append((longer, (*done[:t], k + 1, *done[t + 1 :])))
        if len(seen) > most:
            return
    yield from found


def tiny_placement(chooser: Random) -> tuple[Placement, int]:
    """A random placement and number of micro-batches: chains and DAGs, shared stages, split backwards, or anything."""
    num_ranks = chooser.choice((1, 2, 2, 2, 3))
    link = Link(chooser.choice((0, 0, 1, 3)))
    cluster = Cluster((None,) * num_ranks, link)
    some_ranks = [*range(num_ranks)] * 3 + [tuple(range(num_ranks))]
    if chooser.random() < 0.3:
        return raw_placement(chooser, cluster, some_ranks), chooser.choice((1, 2, 2, 3))
    stages = chooser.choice((1, 2, 2, 3))
    split = chooser.random() < 0.4

    def some(*values: int) -> tuple[int, ...]:
        return tuple(chooser.choice(values) for _ in range(stages))

    held = some(2, 2, 3, 0)
    costs = Costs(
        some(0, 1, 2, 5),
        some(1, 2, 3, 6),
        some(0, 1, 2, 4) if split else None,
        activation_bytes=held,
        input_frees_bytes=tuple(chooser.randint(0, h) for h in held),
        forward_peak_bytes=some(0, 0, 1),
        weight_peak_bytes=some(0, 0, 1),
        boundary_bytes=chooser.choice((0, 0, 1)),
        reduce_us=some(0, 0, 4),
        optimizer_us=some(0, 0, 3),
        edges=None
        if chooser.random() < 0.6
        else tuple((a, b) for a in range(stages) for b in range(a + 1, stages))[:2],
    )
    if chooser.random() < 0.15 and costs.edges is None and stages == num_ranks > 1:
        return bidirectional(costs, cluster), 2
    return place(costs, cluster, [chooser.choice(some_ranks) for _ in range(stages)]), chooser.choice((1, 2, 3, 4))


def raw_placement(chooser: Random, cluster: Cluster, some_ranks: list[int | tuple[int, ...]]) -> Placement:
    names = [(stage, kind) for stage in range(3) for kind in (Kind.F, Kind.B, Kind.W)]
    tasks = []
    for stage, kind in chooser.sample(names, chooser.randint(1, 5)):
        ranks = chooser.choice(some_ranks)
        held = chooser.choice((0, 1, 2, -1, -2))
        on = (ranks,) if isinstance(ranks, int) else ranks
        tasks.append(Task(stage, kind, on, chooser.randint(0, 4), held, chooser.choice((0, 0, 1))))
    pairs = [(a, b) for b in range(len(tasks)) for a in range(b)]
    edges = [Edge(a, b, chooser.choice((0, 1))) for a, b in chooser.sample(pairs, chooser.randint(0, len(pairs)))]
    ends = [
        StepEnd(task.stage, chooser.randint(0, 5), chooser.randint(0, 5))
        for task in {t.stage: t for t in tasks[:2]}.values()
    ]
    return Placement(tuple(tasks), tuple(edges), cluster, step_ends=tuple(ends))


def check_against_every_plan(seed: int, most: int) -> tuple[int, int]:
    """(bounds checked, of these met exactly) for one random placement, under limits from loose to tightest."""
    chooser = Random(seed)
    placement, num_microbatches = tiny_placement(chooser)
    timelines = [simulate(plan) for plan in every_plan(placement, num_microbatches, most)]
    checked = met = 0
    rows = [(timeline.peak_memory_bytes, timeline.makespan_us, timeline.span_us) for timeline in timelines]
    if not rows:
        return 0, 0
    tightest = min(rows, key=lambda row: (sum(row[0]), row[1]))[0]
    loosest = tuple(max(peaks) + 2 for peaks in zip(*(row[0] for row in rows), strict=True))
    for limits in (None, tightest, chooser.choice(rows)[0], loosest):
        fitting = [row for row in rows if limits is None or all(a <= b for a, b in zip(row[0], limits, strict=True))]
        cluster = replace(placement.cluster, limit_bytes=limits or (None,) * placement.num_ranks)
        problem = Problem(replace(placement, cluster=cluster), num_microbatches)
        for objective, column in zip(OBJECTIVES, (1, 2), strict=True):
            least = min(row[column] for row in fitting)
            for bound in bounds.every(problem, objective):
                assert bound.us <= least, (seed, objective, limits, bound, least)
            checked += 1
            met += bounds.best(problem, objective).us == least
        for need in bounds.least_memory(problem):
            assert need.num_bytes <= min(row[0][need.rank] for row in rows), (seed, need)
    return checked, met


def test_no_bound_is_above_the_best_of_all_orders() -> None:
    counts = [check_against_every_plan(seed, most=120) for seed in range(some(250))]
    checked, met = map(sum, zip(*counts, strict=True))
    assert checked > 1.8 * some(250)
    assert met > (0.9 if IS_WHOLE else 0.8) * checked


@pytest.mark.sweep
@pytest.mark.timeout(3600)
def test_no_bound_is_above_the_best_of_all_orders_of_many_more() -> None:
    assert sum(check_against_every_plan(seed, most=60)[0] for seed in range(1_000, 9_000)) > 30_000


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 6, 30])
def test_1f1b_on_a_chain_is_proven_optimal(num_ranks: int, num_microbatches: int) -> None:
    placement = tessel("v", num_ranks, num_ranks)
    timeline = simulate(schedules.one_f_one_b(placement, num_microbatches))
    for objective, us in zip(OBJECTIVES, (timeline.makespan_us, timeline.span_us), strict=True):
        assert us == 4 * num_microbatches + 4 * (num_ranks - 1)
        assert bounds.best(Problem(placement, num_microbatches), objective).us == us


@pytest.mark.parametrize("seed", range(5))
def test_forward_only_chains_are_proven_optimal(seed: int) -> None:
    chooser = Random(seed)
    times = tuple(chooser.randint(0, 50) for _ in range(6))
    ranks = Cluster.uniform(6, latency_us=chooser.randint(0, 9))
    placement = place(Costs(times, 1), ranks).forward_only()
    makespan_us = simulate(schedules.forward_only(placement, 20)).makespan_us
    assert bounds.best(Problem(placement, 20)).us == makespan_us


@pytest.mark.parametrize("seed", range(3))
def test_uneven_zero_bubble_is_proven_within_two_percent(seed: int) -> None:
    chooser = Random(seed)
    times = tuple(round(1000 * chooser.uniform(0.8, 1.2)) for _ in range(16))
    costs = Costs(times, times, times, activation_bytes=2, input_frees_bytes=(1,) * 16)
    placement = place(costs, Cluster.uniform(16, 32))
    makespan_us = simulate(schedules.zb_h1(placement, 64)).makespan_us
    assert 0.98 * makespan_us <= bounds.best(Problem(placement, 64)).us <= makespan_us


@pytest.mark.parametrize("seed", range(12))
def test_no_bound_is_above_a_named_schedule_that_just_fits(seed: int) -> None:
    """Steps with more micro-batches than all orders can be tried of, each under the limits that its plan just keeps."""
    chooser = Random(seed)
    num_ranks, stages_per_rank = chooser.choice((2, 3, 4)), chooser.choice((1, 2))

    def some(most: int) -> tuple[int, ...]:
        return tuple(chooser.randint(0, most) for _ in range(num_ranks * stages_per_rank))

    costs = Costs(some(20), some(20), some(20), 4, forward_peak_bytes=some(2), reduce_us=some(9), optimizer_us=some(9))
    cluster = Cluster.uniform(num_ranks, latency_us=chooser.choice((0, 3)))
    if stages_per_rank == 1:
        named, placement = (schedules.zb_h1, schedules.one_f_one_b), place(costs, cluster)
    else:
        named, placement = (schedules.v_min, schedules.v_half), wave(costs, cluster)
    for schedule in named:
        timeline = simulate(schedule(placement, 4 * num_ranks))
        limited = replace(placement, cluster=replace(cluster, limit_bytes=timeline.peak_memory_bytes))
        problem = Problem(limited, 4 * num_ranks)
        for objective, us in zip(OBJECTIVES, (timeline.makespan_us, timeline.span_us), strict=True):
            assert max(bound.us for bound in bounds.every(problem, objective)) <= us
        needs = [need.num_bytes for need in bounds.least_memory(problem)]
        assert all(need <= peak for need, peak in zip(needs, timeline.peak_memory_bytes, strict=True))


def v_pair(num_ranks: int, limit: int) -> Placement:
    """Two stages per rank, down and up again, backward split."""
    costs = Costs.uniform(2 * num_ranks, 93, 91, 47, activation_bytes=2, input_frees_bytes=1)
    return wave(costs, Cluster.uniform(num_ranks, limit, latency_us=6))


@pytest.mark.parametrize(("num_ranks", "limit", "num_microbatches", "at_least"), [(8, 20, 16, 9613), (4, 8, 8, 5174)])
def test_two_stages_per_rank(num_ranks: int, limit: int, num_microbatches: int, at_least: int) -> None:
    assert bounds.best(Problem(v_pair(num_ranks, limit), num_microbatches)).us >= at_least


def test_memory_that_is_held_bounds_long_steps() -> None:
    best, *_ = bounds.every(Problem(v_pair(8, 12), 128))
    assert best.name == "memory held"
    assert best.us > 128 * bounds.period_bound(v_pair(8, 12))


@pytest.mark.parametrize(
    ("placement", "period"),
    [
        (tessel("v", 4, None), Fraction(4)),
        (tessel("v", 4, 4), Fraction(4)),
        (tessel("v", 4, 3), Fraction(16, 3)),
        (tessel("m", 4, 3), 2 + Fraction(16, 3)),
        (tessel("x", 4, 4), Fraction(4)),
        (v_pair(8, 20), Fraction(462)),
    ],
)
def test_periods(placement: Placement, period: Fraction) -> None:
    assert bounds.period_bound(placement) == period


def test_bytes_of_transfers_raise_bounds() -> None:
    """Ranks hold what is on its way; a rank that has no room for it beside its own must wait."""
    costs = Costs((1, 1), (3, 3), activation_bytes=1, boundary_bytes=1)
    found = []
    for limit in (2, None):
        placement = place(costs, Cluster.uniform(2, limit, latency_us=9))
        found.append((bounds.best(Problem(placement, 20)), bounds.period_bound(placement)))
    (tight, period), (loose, loose_period) = found
    # Rank 0: 26 µs from F to B, 9 while it sends, 9 + 3 from the transfer of the gradient to the end of B; 47 in all.
    assert (period, loose_period) == (Fraction(47, 2), 4)
    assert tight.us >= 20 * period > loose.us
    assert bounds.best(Problem(place(costs, Cluster.uniform(2, 3, latency_us=9)), 20)).us < tight.us


def test_the_least_memory_names_rank_and_task() -> None:
    costs = Costs(
        (1, 1), (1, 1), activation_bytes=(2, 3), backward_peak_bytes=(0, 4), static_bytes=(10, 20), boundary_bytes=1
    )
    placement = place(costs, Cluster.uniform(2, latency_us=1))
    needs = bounds.least_memory(Problem(placement, 9))
    told = [(need.rank, need.num_bytes, str(placement.tasks[need.task])) for need in needs]
    # Rank 0 holds what it sends, and the gradient that it receives; rank 1 what it received while F runs.
    assert told == [(0, 13, "0F"), (1, 27, "1B")]
    assert needs == bounds.least_memory(Problem(placement, 1))


def test_a_step_of_step_ends_and_of_nothing() -> None:
    idle = Placement((Task(0, Kind.F, (0,), 0),), (), Cluster.uniform(2))
    assert bounds.best(Problem(idle, 1)).us == bounds.best(Problem(idle, 1), "span").us == 0
    ends = replace(idle, step_ends=(StepEnd(0, 3, 4),))
    assert bounds.best(Problem(ends, 1)).us == 7 == simulate(Plan(ends, 1, ((Op(0, Kind.F, 0),), ()))).makespan_us
    two_streams = bidirectional(Costs.uniform(3), Cluster.uniform(3))  # only one has a micro-batch
    assert bounds.best(Problem(two_streams, 1)).us == 9


def test_reasons_name_rank_op_and_numbers() -> None:
    best, *others = bounds.every(Problem(tessel("v", 4, 4), 6))
    assert best.name == "load"
    assert best.why == "rank 0 works 24 µs, is idle for 0 before 0F0 and for 12 after it"
    assert [bound.us for bound in others] == sorted((bound.us for bound in others), reverse=True)
    together = bounds.best(Problem(tessel("m", 4, 6), 8)).why
    assert together.startswith("all ranks work together for 16 µs; in addition, rank 0 works 32 µs, ")
