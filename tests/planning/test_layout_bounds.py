"""Bounds on layouts are proofs too: never above the best of all orders."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from rota import Cluster, Costs, bidirectional
from rota.core.simulation import simulate
from rota.planning.layout_bounds import placement_bound_us
from search.bounds.test_bounds import every_plan, tiny_placement


def test_a_bound_on_a_placement_is_never_above_the_best_of_all_orders() -> None:
    checked = 0
    for seed in range(80):
        placement, num_microbatches = tiny_placement(Random(seed))
        times = [simulate(plan).makespan_us for plan in every_plan(placement, num_microbatches, most=120)]
        assert not times or placement_bound_us(placement, num_microbatches) <= min(times), seed
        checked += bool(times)
    assert checked >= 40


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_data_stream_without_micro_batches_costs_no_time(num_ranks: int) -> None:
    """The second stream is the slower one, and has no micro-batch in a step of one."""
    forward = (1,) * num_ranks
    placement = bidirectional(Costs(forward, 3), Cluster.uniform(num_ranks, latency_us=1))
    slower = [task.stage for task, c in zip(placement.tasks, placement.component_of, strict=True) if c == 1]
    tasks = tuple(replace(t, duration_us=9) if t.stage in slower else t for t in placement.tasks)
    placement = replace(placement, tasks=tasks)
    (us,) = {simulate(plan).makespan_us for plan in every_plan(placement, 1, most=120)}
    assert placement_bound_us(placement, 1) == us
