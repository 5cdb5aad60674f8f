"""Shared links, costs of messages and gaps: what the search says of them, against the simulator and all orders."""

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from itertools import permutations, product

import pytest
from hypothesis import given, settings, strategies as st

from rota import Cluster, Costs, Placement, Plan, PlanError, Timeline, check, find_plan, place, simulate
from rota.core.cluster import Link, SharedLink
from rota.planning.layout_bounds import placement_bound_us
from rota.schedules import one_f_one_b, zb_h1, zb_h2
from rota.search import bounds_of, exact, find_repeating
from rota.search.budget import Budget
from rota.search.periodic.steady import find_steady
from rota.search.problem import Problem
from rota.search.result import Objective
from rota.search.timing import score
from support import core_strategies as strategies
from support.sampling import some
from support.search_brute_force import every_plan, tiny_placement

_MOST_ORDERS = 1_500  # of ops and of service together, for a case in which all are tried

seeds = st.integers(0, 1 << 32)


@given(strategies.wired_placements, st.integers(1, 4), seeds, st.booleans())
@settings(max_examples=some(300))
def test_the_simulator_and_the_search_agree(placement: Placement, count: int, seed: int, is_given: bool) -> None:
    sequence = strategies.linear_extension(placement, count, random.Random(seed), in_order=True)
    plan = strategies.deal(placement, count, sequence)
    if is_given:
        transfers = dict(plan.shared_transfers.transfers())
        plan = replace(plan, service_orders=tuple(tuple(transfers[node] for node in nodes) for nodes in plan.served))
    problem, timeline = Problem(plan.placement, plan.num_microbatches), simulate(plan)
    orders = problem.to_orders(plan)
    assert score(problem, orders) == (timeline.makespan_us, timeline.span_us)
    again = problem.to_plan(orders)
    assert again.orders == plan.orders
    assert (simulate(again).ends_us, simulate(again).sent_us) == (timeline.ends_us, timeline.sent_us)


def _tiny(chooser: random.Random) -> list[Plan]:
    """All plans of a tiny placement with shared links and all orders of service; empty if too many, or only one."""
    placement = tiny_placement(chooser, carries=True)
    every = tuple(range(placement.num_ranks))

    def some_ranks() -> tuple[int, ...]:
        return tuple(chooser.sample(every, chooser.randint(1, len(every))))

    pairs = [(every, every), (some_ranks(), some_ranks())][: chooser.randint(1, 2)]
    shared = tuple(SharedLink(f"link {i}", chooser.randint(1, 3), *pair) for i, pair in enumerate(pairs))
    link = Link(chooser.choice((0, 1, 3)), chooser.choice((None, 2)))
    cluster = replace(placement.cluster, link=link, shared=shared)
    plans = every_plan(replace(placement, cluster=cluster), chooser.randint(1, 2))
    served_plans: list[Plan] = []
    for plan in plans:
        for served in _every_service_order(plan):
            served_plans.append(served)
            if len(served_plans) > _MOST_ORDERS:
                return []
    return served_plans if len(served_plans) > 1 else []


def _every_service_order(plan: Plan) -> Iterator[Plan]:
    """The plan with all orders of service, each transfer's micro-batches in any order."""
    placement = plan.placement
    by_link = [
        [placement.transfer(r, m) for r, route in enumerate(placement.routes) if link in route.shared
         for m in plan.microbatches_on(r)]
        for link in range(len(placement.cluster.shared))
    ]  # fmt: skip
    for orders in product(*map(permutations, by_link)):
        yield replace(plan, service_orders=orders)


def _that_fit(plans: list[Plan]) -> list[Timeline]:
    """The timelines of those that can run in memory."""
    fitting = []
    for plan in plans:
        with suppress(PlanError):
            check(plan)
            fitting.append(simulate(plan))
    return fitting


@pytest.mark.parametrize("seed", range(6))
def test_the_best_of_all_orders_is_found_and_no_bound_is_above_it(seed: int) -> None:
    chooser, tried = random.Random(seed), 0
    while tried < 6:
        plans = _tiny(chooser)
        fitting = _that_fit(plans)
        if not fitting:
            continue
        tried += 1
        placement, num_microbatches = plans[0].placement, plans[0].num_microbatches
        carried = Problem(placement, num_microbatches).lowered.carried
        for objective, best in (
            ("makespan", min(timeline.makespan_us for timeline in fitting)),
            ("span", min(timeline.span_us for timeline in fitting)),
        ):
            assert all(bound.us <= best for bound in bounds_of(placement, num_microbatches, objective))
            result = find_plan(placement, num_microbatches, objective=objective, time_limit_s=1, deterministic=True)
            check(result.plan)
            assert result.bound_us <= best
            in_order = result.makespan_us if objective == "makespan" else result.span_us
            assert in_order == result.value_us >= best
            if not any(placement.cluster.limit_bytes[carry.rank] is not None for carry in carried):
                assert result.value_us == best
                assert result.is_optimal or objective == "span"
            elif objective == "makespan":
                problem, budget = Problem(placement, num_microbatches), Budget(20.0, deterministic=True)
                solved = exact.solve(problem, "makespan", None, 0, budget, transfers="as in a plan")
                assert solved.is_complete
                (least,) = _that_fit([problem.to_plan(solved.orders)])
                assert least.makespan_us == min(t.makespan_us for t in fitting if _is_in_order(t.plan))


def _is_in_order(plan: Plan) -> bool:
    ops = all([*row].index(op) <= [*row].index(later) for row in plan.orders for op in row for later in row
              if op[:2] == later[:2] and op.microbatch < later.microbatch)  # fmt: skip
    services = all(
        i < j
        for order in plan.service_orders
        for i, a in enumerate(order)
        for j, b in enumerate(order)
        if (a.source[:2], a.target[:2], a[2:]) == (b.source[:2], b.target[:2], b[2:])
        and a.source.microbatch < b.source.microbatch
    )
    return ops and services


def _chain(num_ranks: int, rate: int, limit: int | None = None, link: Link | None = None) -> Placement:
    """F I W on each rank, all messages through one host."""
    costs = Costs.uniform(num_ranks, 100, 100, 100, activation_bytes=2000, boundary_bytes=1000)
    every = tuple(range(num_ranks))
    return place(costs, Cluster((limit,) * num_ranks, link or Link(), shared=(SharedLink("host", rate, every, every),)))


@given(seeds)
@settings(max_examples=some(15))
def test_a_search_is_never_worse_than_the_named_plans_and_says_what_the_simulator_does(seed: int) -> None:
    chooser = random.Random(seed)
    link = Link(chooser.choice((0, 5)), chooser.choice((None, 50)))
    placement = _chain(chooser.choice((2, 3, 4)), chooser.choice((10, 20, 50)), chooser.choice((None, 14_000)), link)
    result = find_plan(placement, chooser.randint(2, 8), time_limit_s=0.3, deterministic=True)
    check(result.plan)
    assert simulate(result.plan).makespan_us == result.makespan_us == result.value_us >= result.bound_us
    assert all(result.makespan_us <= named.makespan_us for named in result.named if named.fits)


def test_a_busy_shared_link_bounds_the_step_and_the_period() -> None:
    placement = _chain(4, 5)  # 200 µs for a message, six of them for a micro-batch
    result = find_plan(placement, 6, time_limit_s=1, deterministic=True)
    assert "the shared link host" in result.why
    assert result.bound_us >= 6 * 6 * 200
    period = find_plan(placement, 6, objective="period", time_limit_s=1, deterministic=True)
    assert period.value_us == period.bound_us == Fraction(6 * 200)
    assert period.why == "the shared link host works 1,200 µs for a micro-batch"


@pytest.mark.parametrize("limit", [None, 9_000])
def test_a_steady_state_with_shared_links_holds_when_it_is_verified_and_unrolled(limit: int | None) -> None:
    placement = _chain(3, 20, limit, Link(7, 100))
    result = find_steady(placement, Budget(2.0, deterministic=True))
    result.steady.verify()
    assert result.steady.us_per_microbatch >= result.bound_us
    for periods in (1, 4, 9):
        plan = result.steady.unroll(periods * result.steady.microbatches_per_period)
        check(plan)
        assert plan.service_orders
        assert simulate(plan).makespan_us <= result.steady.latency_us + (periods - 1) * result.steady.period_us


def test_a_repeating_step_knows_shared_links() -> None:
    step = find_repeating(_chain(2, 20), 6, time_limit_s=2)
    assert simulate(step.plan).makespan_us == step.makespan_us
    longer = step.unroll(9)
    assert simulate(longer.plan).makespan_us <= step.makespan_us + 3 * step.period_us
    check(longer.plan)


@pytest.mark.parametrize("objective", ["makespan", "span", "period"])
def test_a_shared_link_that_nothing_uses_changes_no_answer(objective: Objective) -> None:
    cluster = Cluster.uniform(4, 14, latency_us=3)
    placement = place(Costs([30, 33, 28, 31], [29, 31, 30, 35], [18, 19, 17, 20], activation_bytes=2), cluster)
    every = (0, 1, 2, 3)
    shared = replace(placement, cluster=replace(cluster, shared=(SharedLink("host", 1, every, every),)))
    alone, same = (
        find_plan(case, 9, objective=objective, time_limit_s=0.4, deterministic=True) for case in (placement, shared)
    )
    assert (alone.plan.orders, alone.value_us, alone.bound_us) == (same.plan.orders, same.value_us, same.bound_us)
    assert same.plan.service_orders == ((),)


@given(seeds)
@settings(max_examples=some(30))
def test_the_bound_on_a_layout_is_below_every_plan(seed: int) -> None:
    chooser = random.Random(seed)
    link = Link(chooser.choice((0, 5)), chooser.choice((None, 50)))
    placement, num_microbatches = _chain(4, chooser.choice((10, 100, 1000)), None, link), chooser.randint(1, 6)
    sequence = strategies.linear_extension(placement, num_microbatches, chooser, in_order=True)
    plans = [strategies.deal(placement, num_microbatches, sequence)]
    plans += [schedule(placement, num_microbatches) for schedule in (zb_h1, zb_h2, one_f_one_b)]
    least = placement_bound_us(placement, num_microbatches)
    assert all(least <= simulate(plan).makespan_us for plan in plans)
