"""List scheduling never breaks the limit and never gets stuck where one micro-batch at a time fits."""

from collections import Counter

import numpy as np
from hypothesis import given, strategies as st

from rota.core.plan import Plan
from rota.search.dispatching import Dispatcher, backwards, serial
from rota.search.problem import NO_LIMIT, Problem
from rota.search.timing import fits, peaks, score
from support import core_strategies as strategies
from support.core_strategies import with_limits


def tightest(plan: Plan) -> Problem:
    """As much memory as one micro-batch at a time needs."""
    problem = Problem(plan.placement, plan.num_microbatches)
    static = plan.placement.static_bytes
    limits = [int(peak) + more for peak, more in zip(peaks(problem, serial(problem)), static, strict=True)]
    return Problem(with_limits(plan, limits).placement, plan.num_microbatches)


def leaves_bytes_behind(problem: Problem) -> bool:
    """Whether a micro-batch, once done, still holds memory on some rank."""
    left: Counter[tuple[int, int]] = Counter()
    for stream, task in zip(problem.placement.component_of, problem.placement.tasks, strict=True):
        for rank in task.ranks:
            left[rank, stream] += task.held_bytes
    return any(num_bytes > 0 for num_bytes in left.values())


@given(strategies.plans(), st.integers(0, 2**16), st.sampled_from((0.0, 0.5, 3.0)))
def test_any_priorities_make_orders_that_fit(plan: Plan, seed: int, patience: float) -> None:
    """With tight memory too, unless what micro-batches leave behind for good fills it in an unlucky order."""
    for problem in (Problem(plan.placement, plan.num_microbatches), tightest(plan)):
        priorities = np.random.default_rng(seed).random(problem.first_node[-1])
        orders = Dispatcher(problem)(priorities, patience)
        if orders is None:
            assert leaves_bytes_behind(problem)
            assert (problem.limits_bytes < NO_LIMIT).any()
            continue
        assert fits(problem, orders)
        assert score(problem, orders) is not None


@given(strategies.plans(), st.integers(0, 2**16))
def test_caps_hold_and_never_get_stuck(plan: Plan, seed: int) -> None:
    problem, random = tightest(plan), np.random.default_rng(seed)
    caps = random.integers(1, 4, len(problem.counts))
    orders = Dispatcher(problem)(random.random(problem.first_node[-1]), 0.5, None, caps)
    if orders is None:
        assert leaves_bytes_behind(problem)
        return
    assert fits(problem, orders)
    for task, backward in enumerate(backwards(problem)):
        if backward >= 0:
            rank = problem.ranks[task][0]
            row = orders[problem.first_op[rank] : problem.first_op[rank + 1]]
            in_flight = np.cumsum((row == task).astype(int) - (row == backward))
            assert in_flight.max(initial=0) <= caps[task]
