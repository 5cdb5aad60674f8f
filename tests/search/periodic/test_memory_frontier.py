"""Memory against period: less memory is slower, and every point keeps its limit, with what its transfers hold."""

from itertools import pairwise

from hypothesis import given, settings, strategies as st

from rota import Cluster, Costs, check, place
from rota.search import Frontier, find_frontier
from support.sampling import some


def require_true(curve: Frontier, *nums_microbatches: int) -> None:
    """All points are within their limits, at flat starts and unrolled, and each is faster than those before."""
    assert all(a.us_per_microbatch > b.us_per_microbatch for a, b in pairwise(curve.points))
    for point in curve.points:
        assert point.peak_bytes <= point.limit_bytes
        assert point.bound_us <= point.us_per_microbatch
        point.result.steady.verify()
        for num_microbatches in nums_microbatches:
            plan = point.result.steady.unroll(num_microbatches)
            assert set(plan.placement.cluster.limit_bytes) == {point.limit_bytes}
            check(plan)


def test_more_memory_is_faster_until_the_work_is_met() -> None:
    placement = place(Costs.uniform(4, 1, 3), Cluster.uniform(4))
    curve = find_frontier(placement, time_limit_s=30, microbatches_per_period=1, deterministic=True)
    assert [(point.limit_bytes, point.us_per_microbatch) for point in curve.points] == [(1, 16), (2, 8), (4, 4)]
    require_true(curve, 8)
    several = find_frontier(placement, time_limit_s=60, deterministic=True).points
    assert [str(point.us_per_microbatch) for point in several] == ["16", "8", "16/3", "4"]


def test_limits_hold_with_transfers() -> None:
    placement = place(Costs.uniform(4, 10, 20, activation_bytes=10, boundary_bytes=8), Cluster.uniform(4, latency_us=5))
    curve = find_frontier(placement, time_limit_s=1, deterministic=True)
    assert len(curve.points) > 2
    require_true(curve, 1, 2, 5, 16)


@settings(max_examples=some(10))
@given(
    st.integers(2, 4),
    st.tuples(st.integers(1, 9), st.integers(0, 12)),
    st.tuples(st.integers(0, 9), st.sampled_from([None, 4])),
    st.integers(0, 9),
    st.integers(1, 24),
)
def test_any_chain(
    num_ranks: int, sizes: tuple[int, int], times: tuple[int, int | None], latency_us: int, num_microbatches: int
) -> None:
    costs = Costs.uniform(num_ranks, times[0], 7, times[1], activation_bytes=sizes[0], boundary_bytes=sizes[1])
    placement = place(costs, Cluster.uniform(num_ranks, latency_us=latency_us, bytes_per_us=3))
    require_true(find_frontier(placement, time_limit_s=0.3, deterministic=True), num_microbatches)
