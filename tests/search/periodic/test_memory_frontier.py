"""Memory against period."""

from __future__ import annotations

from itertools import pairwise

from rota import Cluster, Costs, place
from rota.search.periodic.memory_frontier import find_frontier


def test_more_memory_is_faster_until_the_work_is_met():
    placement = place(Costs.uniform(4, 1, 3), Cluster.uniform(4))
    points = find_frontier(placement, time_limit_s=30, microbatches_per_period=1, deterministic=True).points
    assert [(point.limit_bytes, point.us_per_microbatch) for point in points] == [(1, 16), (2, 8), (4, 4)]
    assert all(a.us_per_microbatch > b.us_per_microbatch for a, b in pairwise(points))
    for point in points:
        assert point.peak_bytes <= point.limit_bytes
        assert point.bound_us <= point.us_per_microbatch
        point.result.steady.verify()


def test_several_micro_batches_a_period_lie_between():
    placement = place(Costs.uniform(4, 1, 3), Cluster.uniform(4))
    points = find_frontier(placement, time_limit_s=60, deterministic=True, microbatches_per_period=None).points
    assert [str(point.us_per_microbatch) for point in points] == ["16", "8", "16/3", "4"]
