"""Windows of given orders, reordered: never worse, within memory, and the best where one window is all."""

import random
from typing import Literal

import pytest

from rota.core.simulation import check
from rota.search.budget import Budget
from rota.search.local.neighbourhood import improve
from rota.search.problem import Orders, Problem
from rota.search.timing import score
from support.sampling import some
from support.search_brute_force import tiny_cases


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
