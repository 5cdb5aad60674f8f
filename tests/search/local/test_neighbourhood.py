"""Windows of given orders, reordered: never worse, within memory, and the best where one window is all."""

from __future__ import annotations

import random
from typing import Literal

import numpy as np
import pytest

from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.simulation import check
from rota.search.budget import Budget
from rota.search.local.neighbourhood import improve
from rota.search.problem import Orders, Problem
from rota.search.timing import score
from rota.shapes import v_shape
from support.sampling import some
from support.search_brute_force import tiny_cases


def _serial(problem: Problem) -> Orders:
    """One micro-batch after the other."""
    tasks = problem.placement.tasks
    ops = sorted((k, place, t) for place, t in enumerate(problem.topological) for k in range(problem.counts[t]))
    rows = [[t for _, _, t in ops if rank in tasks[t].ranks] for rank in range(problem.placement.num_ranks)]
    return np.array([t for row in rows for t in row], dtype=np.int32)


def _v(num_ranks: int = 4, limit: int = 4, num_microbatches: int = 6) -> Problem:
    costs = Costs.uniform(num_ranks, 1, 3, activation_bytes=1)
    return Problem(v_shape(costs, Cluster.uniform(num_ranks, limit)), num_microbatches)


def _value(problem: Problem, orders: Orders, objective: str = "makespan") -> int:
    timed = score(problem, orders)
    assert timed is not None
    return timed.makespan_us if objective == "makespan" else timed.span_us


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_finds_the_best_of_tiny_steps(objective: Literal["makespan", "span"]) -> None:
    chooser = random.Random(2)
    for placement, num_microbatches, best in tiny_cases(some(40), seed=8):
        if best is None:
            continue
        problem, least = Problem(placement, num_microbatches), getattr(best, f"{objective}_us")
        orders = problem.to_orders(chooser.choice(best.fitting))
        better = improve(problem, orders, objective, least, Budget(0.1, deterministic=True))
        check(problem.to_plan(better))
        assert least <= _value(problem, better, objective) <= _value(problem, orders, objective)
        if objective == "makespan":  # windows of a span leave the first starts where they are
            assert _value(problem, better) == least
