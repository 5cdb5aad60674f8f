"""Local search through orders that do not fit: what it hands over fits, and is the best of all orders."""

from __future__ import annotations

from rota.checking import check
from rota.search.budget import Budget
from rota.search.dispatching import serial
from rota.search.local.fitting import find_fitting
from rota.search.problem import NO_LIMIT, Orders, Problem
from rota.simulation import simulate
from support.sampling import some
from support.search_brute_force import tiny_cases


def found_in(problem: Problem, objective: str, seconds: float, below_us: int = NO_LIMIT) -> list[int]:
    """The values of all that is found, each of which passes all checks."""
    values: list[int] = []

    def take(orders: Orders) -> bool:
        plan = problem.to_plan(orders)
        check(plan)
        values.append(getattr(simulate(plan), f"{objective}_us"))
        return True

    budget = Budget(seconds, deterministic=True)
    find_fitting(problem, [serial(problem)], objective == "span", below_us, 0, budget, 1, take)
    return values


def test_finds_the_best_of_all_orders() -> None:
    for objective in ("makespan", "span"):
        for placement, num_microbatches, best in tiny_cases(some(60), seed=5, carries=True):
            plans = [] if best is None else best.fitting
            values = found_in(Problem(placement, num_microbatches), objective, 0.05)
            assert values == sorted(set(values), reverse=True)
            least = min((getattr(simulate(plan), f"{objective}_us") for plan in plans), default=None)
            assert (values[-1] if values else None) == least, placement


def test_nothing_is_found_below_the_value_that_is_known() -> None:
    for placement, num_microbatches, best in tiny_cases(some(20), seed=6, carries=True):
        if best is None:
            continue
        problem, least = Problem(placement, num_microbatches), min(simulate(p).makespan_us for p in best.fitting)
        assert not found_in(problem, "makespan", 0.02, below_us=least)
