"""A problem's arrays against what the placement says."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from rota import Cluster, Costs, place
from rota.core.plan import Plan
from rota.search.problem import Problem, reserving
from support import core_strategies as strategies


@given(strategies.plans())
@settings(deadline=None)
def test_topological_order_takes_the_lowest_of_those_that_can_come_next(plan: Plan) -> None:
    problem = Problem(plan.placement, plan.num_microbatches)
    left = set(range(len(plan.placement.tasks)))
    for task in problem.topological:
        waiting = {target for source, target in problem.lags_us if source in left}
        assert task == min(left - waiting)
        left.remove(task)
    assert not left


@given(strategies.plans())
@settings(deadline=None)
def test_after_is_the_transitive_closure_of_the_edges(plan: Plan) -> None:
    problem = Problem(plan.placement, plan.num_microbatches)
    pairs = set(problem.lags_us)
    while further := {(a, d) for a, b in pairs for c, d in pairs if b == c} - pairs:
        pairs |= further
    assert set(zip(*(rows.tolist() for rows in np.nonzero(problem.after)), strict=True)) == pairs


@given(strategies.plans())
@settings(deadline=None)
def test_step_ends_are_those_of_the_placement(plan: Plan) -> None:
    placement = plan.placement
    step_ends = Problem(placement, plan.num_microbatches).step_ends
    for rank in range(placement.num_ranks):
        ends = [end for end in placement.step_ends if rank in placement.gradient_ranks(end.stage)]
        own = step_ends.of_rank(rank)
        assert [int(step_ends.reduce_us[i]) for i in own] == [end.reduce_us for end in ends]
        assert step_ends.optimizers_us(rank) == sum(end.optimizer_us for end in ends)
        for i, end in zip(own, ends, strict=True):
            tasks = [placement.tasks[task] for task in step_ends.gradients_of(i)]
            assert [(task.stage, task.kind) for task in tasks] == [
                (task.stage, task.kind)
                for task in placement.tasks
                if task.stage == end.stage and task.kind.makes_weight_gradients
            ]


def test_reserved_bytes_add_up_and_are_taken_off_the_limits() -> None:
    costs = Costs.uniform(2, activation_bytes=10, static_bytes=5)
    problem = Problem(place(costs, Cluster.uniform(2, 100)), 4)
    once = reserving(problem, np.array([1, 0]))
    twice = reserving(once, np.array([2, 3]))
    assert [p.limits_bytes.tolist() for p in (problem, once, twice)] == [[95, 95], [94, 95], [92, 92]]
