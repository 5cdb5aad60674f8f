"""Bounds are proofs: never above the best of all orders; and where the best is known, as high as it."""

from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest

from rota import Cluster, Costs, Kind, Op, Placement, Plan, StepEnd, Task, schedules, simulate
from rota.core.placing import bidirectional, place, wave
from rota.search import bounds
from rota.search.problem import Problem
from support.problem_library import proven_us
from support.sampling import IS_WHOLE, some
from support.search_brute_force import limited_steps
from support.tessel_shapes import tessel

OBJECTIVES = ("makespan", "span")


def check_against_every_plan(seed: int, most: int) -> tuple[int, int]:
    """(bounds checked, of these met exactly) for one random placement, under limits from loose to tightest."""
    checked = met = 0
    steps = limited_steps(seed, most)
    for problem, fitting in steps:
        for objective in OBJECTIVES:
            least = min(getattr(timeline, f"{objective}_us") for timeline in fitting)
            for bound in bounds.every(problem, objective):
                assert bound.us <= least, (seed, objective, problem.limits_bytes, bound, least)
            checked += 1
            met += bounds.best(problem, objective).us == least
        for need in bounds.least_memory(problem):
            assert need.num_bytes <= min(t.peak_memory_bytes[need.rank] for t in steps[0][1]), (seed, need)
    return checked, met


def test_no_bound_is_above_the_best_of_all_orders() -> None:
    counts = [check_against_every_plan(seed, most=60) for seed in range(some(250))]
    checked, met = map(sum, zip(*counts, strict=True))
    assert checked > 1.8 * some(250)
    assert met > (0.9 if IS_WHOLE else 0.8) * checked


@pytest.mark.sweep
@pytest.mark.timeout(3600)
def test_no_bound_is_above_the_best_of_all_orders_of_many_more() -> None:
    assert sum(check_against_every_plan(seed, most=20)[0] for seed in range(1_000, 9_000)) > 30_000


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
        *((tessel("v", 4, None), Fraction(4)), (tessel("v", 4, 4), Fraction(4))),
        *((tessel("v", 4, 3), Fraction(16, 3)), (tessel("m", 4, 3), 2 + Fraction(16, 3))),
        *((tessel("x", 4, 4), Fraction(4)), (v_pair(8, 20), Fraction(462))),
    ],
)
def test_periods(placement: Placement, period: Fraction) -> None:
    assert bounds.period_bound(placement) == period


def test_bytes_of_transfers_raise_bounds() -> None:
    """Ranks hold what is on its way; a rank that has no room for it beside its own must wait."""
    costs = Costs((1, 1), (3, 3), activation_bytes=1, boundary_bytes=1)
    bounds_and_periods = []
    for limit in (2, None):
        placement = place(costs, Cluster.uniform(2, limit, latency_us=9))
        bounds_and_periods.append((bounds.best(Problem(placement, 20)), bounds.period_bound(placement)))
    (tight, period), (loose, loose_period) = bounds_and_periods
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
    named = [(need.rank, need.num_bytes, str(placement.tasks[need.task])) for need in needs]
    # Rank 0 holds what it sends, and the gradient that it receives; rank 1 what it received while F runs.
    assert named == [(0, 13, "0F"), (1, 27, "1B")]
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


# --- certificates: a checker that knows nothing of Rota proves each bound from them, and never more than is true ------


def check_certificates(seed: int, most: int) -> tuple[int, int]:
    """(bounds, of these with a certificate) for one random placement without, and with tight, limits."""
    proven_bounds = written = 0
    for problem, fitting in limited_steps(seed, most)[:3]:
        for bound in bounds.every(problem):
            certificate = bound.proof and bounds.certificate_of(problem, bound.proof)
            proven_bounds += bound.proof is not None
            if certificate:
                written += 1
                proven = proven_us(problem.placement, problem.num_microbatches, certificate)
                assert proven is not None
                least = min(timeline.makespan_us for timeline in fitting)
                assert proven <= least, (seed, problem.limits_bytes, bound, certificate, proven)
    return proven_bounds, written


def test_no_certificate_proves_more_than_the_best_of_all_orders() -> None:
    counts = [check_certificates(seed, most=60) for seed in range(some(150))]
    proven_bounds, written = map(sum, zip(*counts, strict=True))
    assert proven_bounds > 3 * some(150)
    assert written > (0.95 if IS_WHOLE else 0.9) * proven_bounds


@pytest.mark.parametrize(
    ("name", "limit"), [("v", 3), ("x", 2), ("x", 3), ("x", 4), ("m", 3), ("nn", 3), ("nn-eager", 6), ("k", 2)]
)
def test_all_of_a_bound_is_proven_on_tessels_shapes(name: str, limit: int) -> None:
    for num_ranks in (4, 8):
        problem = Problem(tessel(name, num_ranks, limit * num_ranks // 4), 64)
        bound = bounds.best(problem)
        assert bound.proof is not None
        certificate = bounds.certificate_of(problem, bound.proof)
        assert certificate is not None
        assert proven_us(problem.placement, 64, certificate) == bound.us


@pytest.mark.parametrize("seed", range(6))
def test_all_of_a_bound_is_proven_under_memory_limits(seed: int) -> None:
    chooser = Random(seed)
    times = ([chooser.randrange(70, 130) for _ in range(8)] for _ in range(3))
    costs = Costs(*times, activation_bytes=2)  # type: ignore[arg-type]
    arguments = set()
    for limit in (4, 6, 8, 12):
        for placement in (place(costs, Cluster.uniform(8, limit, 3)), wave(costs, Cluster.uniform(4, limit, 3))):
            problem = Problem(placement, 24)
            for bound in bounds.every(problem):
                if bound.proof is not None:
                    certificate = bounds.certificate_of(problem, bound.proof)
                    assert certificate is not None
                    assert (proven_us(placement, 24, certificate) or 0) >= bound.us, bound
                    arguments.add(bound.proof.argument)
    assert arguments == {"load", "path", "area"}
