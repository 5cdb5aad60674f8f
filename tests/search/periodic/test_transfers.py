"""What transfers hold, which depends on the times: steady states, frontiers and whole steps within their limits."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from rota import Cluster, Costs, check, place
from rota.search import find_frontier
from support.sampling import some


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
