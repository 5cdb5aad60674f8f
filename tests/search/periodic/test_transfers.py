"""What transfers hold, which depends on the times: steady states, frontiers and whole steps within their limits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota import Cluster, Costs, Placement, SearchError, check, find_plan, place
from rota.search import find_frontier
from support.sampling import some
from support.search_brute_force import best_of, every_plan, tiny_placement


def with_limit(placement: Placement, limit_bytes: int) -> Placement:
    return replace(placement, cluster=replace(placement.cluster, limit_bytes=(limit_bytes,) * placement.num_ranks))


def test_a_frontier_keeps_its_limits() -> None:
    placement = place(Costs.uniform(4, 10, 20, activation_bytes=10, boundary_bytes=8), Cluster.uniform(4, latency_us=5))
    points = find_frontier(placement, time_limit_s=1, deterministic=True).points
    assert len(points) > 2
    for point in points:
        point.result.steady.verify()
        for num_microbatches in (1, 2, 5, 16):
            check(with_limit_of(point, num_microbatches))


def with_limit_of(point, num_microbatches):  # type: ignore[no-untyped-def]
    plan = point.result.steady.unroll(num_microbatches)
    assert set(plan.placement.cluster.limit_bytes) == {point.limit_bytes}
    return plan


@settings(max_examples=some(10), deadline=None)
@given(
    st.integers(2, 4),
    st.integers(1, 9),
    st.integers(0, 12),
    st.integers(0, 9),
    st.integers(0, 9),
    st.booleans(),
    st.integers(1, 24),
)
def test_every_point_of_a_frontier_fits_when_it_is_unrolled(
    num_ranks: int, activation: int, boundary: int, latency: int, forward: int, is_split: bool, num_microbatches: int
) -> None:
    costs = Costs.uniform(
        num_ranks, forward, 7, 4 if is_split else None, activation_bytes=activation, boundary_bytes=boundary
    )
    placement = place(costs, Cluster.uniform(num_ranks, latency_us=latency, bytes_per_us=3))
    curve = find_frontier(placement, time_limit_s=0.3, deterministic=True)
    for point in curve.points:
        point.result.steady.verify()
        assert point.peak_bytes <= point.limit_bytes
        assert point.bound_us <= point.us_per_microbatch
        check(with_limit_of(point, num_microbatches))


def tiny_cases(count: int, seed: int) -> Iterator[tuple[Placement, int]]:
    """As `search_brute_force` has them, with bytes on every edge and some limit."""
    chooser = random.Random(seed)
    while count:
        placement, num_microbatches = tiny_placement(chooser), chooser.randint(1, 4)
        edges = tuple(edge._replace(num_bytes=chooser.randint(1, 3)) for edge in placement.edges)
        placement = replace(placement, edges=edges)
        if placement.routes and any(limit is not None for limit in placement.cluster.limit_bytes):
            count -= 1
            yield placement, num_microbatches


def test_a_plan_is_found_wherever_brute_force_finds_one() -> None:
    """One with each task's micro-batches in order: the search knows no others."""
    num_fitting = 0
    for placement, num_microbatches in tiny_cases(some(250), seed=1):
        plans = every_plan(placement, num_microbatches)
        best = None if plans is None else best_of(plans)
        if best is not None and best.fitting:
            num_fitting += 1
            result = find_plan(placement, num_microbatches, time_limit_s=0.1, deterministic=True)
            check(result.plan)
            assert result.bound_us <= best.makespan_us, placement
    assert num_fitting > 0.08 * some(250)


def test_nothing_is_found_where_a_plan_out_of_order_fits() -> None:
    """No claim that nothing fits, then: one with micro-batches out of order may."""
    for placement, num_microbatches in tiny_cases(some(100), seed=2):
        plans = every_plan(placement, num_microbatches)
        if plans is not None and best_of(plans) is None:
            with pytest.raises(SearchError) as error:
                find_plan(placement, num_microbatches, time_limit_s=0.1, deterministic=True)
            assert "nothing fits" not in str(error.value)
