"""Which plans stay ready."""

from __future__ import annotations

from typing import Any

from rota import Cluster, Costs, Plan, place
from rota.runtime.ready_plans import ReadyPlan, ReadyPlans
from rota.schedules import one_f_one_b

PLACEMENT = place(Costs.uniform(2), Cluster.uniform(2))


def made(plan: Plan, number: int, sizes: tuple[Any, ...]) -> ReadyPlan:
    nothing: Any = None
    return ReadyPlan(plan, number, sizes, nothing, nothing, nothing)


def test_a_plan_that_is_used_again_and_again_stays_ready_among_others_that_are_used_once() -> None:
    plans = ReadyPlans(one_f_one_b(PLACEMENT, 2), made)
    often, at_times = one_f_one_b(PLACEMENT, 2), one_f_one_b(PLACEMENT, 2)
    first, second = plans.get(often), plans.get(at_times, [(1,), (2,)])
    for number in range(30):
        plans.get(one_f_one_b(PLACEMENT, 3))
        assert plans.get(often) is first
        if number % 6 == 0:
            assert plans.get(at_times, [(1,), (2,)]) is second
    for _ in range(8):
        plans.get(one_f_one_b(PLACEMENT, 3))
    assert plans.get(often) is not first
