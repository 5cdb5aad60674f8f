"""Steps whose transfers hold memory: equal to trying all orders, and nothing is refused that has a plan."""

from functools import partial

import pytest

from rota.core.errors import SearchError
from rota.core.simulation import check, simulate
from rota.search import bounds, find_plan
from rota.search.budget import Budget
from rota.search.exact import longest_us, solve
from rota.search.problem import Problem
from support.sampling import IS_WHOLE, some
from support.search_brute_force import Case, tiny_cases

OBJECTIVES = ("makespan", "span")


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return list(tiny_cases(some(150), seed=11, carries=True))


def in_turn(case: Case, objective: str) -> int | None:
    """The best of all orders in which each task does its micro-batches in turn; None: none fits."""
    plans = [] if case.best is None else case.best.fitting
    return min((getattr(simulate(plan), f"{objective}_us") for plan in plans), default=None)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_equals_brute_force(cases: list[Case], objective: str) -> None:
    for case in cases:
        problem = Problem(case.placement, case.num_microbatches)
        budget = Budget(10, deterministic=True)
        found = solve(problem, objective, None, 0, budget, transfers="as in a plan")  # type: ignore[arg-type]
        least = in_turn(case, objective)
        assert found.is_complete
        if least is None:
            assert found.orders is None
            assert found.bound_us > longest_us(problem)
        else:
            assert found.orders is not None
            plan = problem.to_plan(found.orders)
            check(plan)
            assert getattr(simulate(plan), f"{objective}_us") == found.bound_us == least, case.placement


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_with_waits_it_is_a_bound_for_every_plan(cases: list[Case], objective: str) -> None:
    """Also for plans out of turn, which brute force tries too."""
    none_fits = 0
    for case in cases:
        problem = Problem(case.placement, case.num_microbatches)
        budget = Budget(10, deterministic=True)
        found = solve(problem, objective, None, 0, budget, transfers="with waits")  # type: ignore[arg-type]
        if case.best is None:
            none_fits += found.bound_us > longest_us(problem)
            continue
        least = getattr(case.best, f"{objective}_us")
        assert found.bound_us <= least, case.placement
        assert bounds.best(problem, objective).us <= least, case.placement
    assert none_fits > 0 or not IS_WHOLE


@pytest.mark.parametrize("objective", [pytest.param("makespan", marks=pytest.mark.sweep), "span"])
def test_the_search_finds_the_best_and_refuses_nothing_that_has_a_plan(cases: list[Case], objective: str) -> None:
    refused = 0
    for case in cases:
        least = in_turn(case, objective)
        search = partial(find_plan, case.placement, case.num_microbatches, objective=objective, deterministic=True)
        if least is None:
            with pytest.raises(SearchError) as refusal:
                search(time_limit_s=0.3)
            refused += 1
            assert case.best is None or "even if ops wait" not in str(refusal.value), case.placement
            continue
        result = search(time_limit_s=1)
        assert result.value_us == least, case.placement
        assert case.best is not None
        assert result.bound_us <= getattr(case.best, f"{objective}_us"), case.placement
    assert refused > 5 or not IS_WHOLE
