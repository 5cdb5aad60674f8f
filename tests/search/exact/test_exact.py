"""The whole step as one model: equal to trying all orders, and proven."""

import random
from functools import partial

import pytest

from rota import Cluster, Costs, Placement, SearchError, check, find_plan, simulate
from rota.search import bounds
from rota.search.budget import Budget
from rota.search.exact import Exact, cpsat, longest_us, solve
from rota.search.problem import Problem
from rota.search.timing import score
from rota.shapes import k_shape, m_shape, nn_shape, v_shape, x_shape
from support.sampling import IS_WHOLE, some
from support.search_brute_force import Case, tiny_cases

OBJECTIVES = ("makespan", "span")
_UNIT = {"forward_us": 1, "backward_us": 3, "activation_bytes": 1}


def _shared(num_stages: int, *shared: int) -> Costs:
    """Stages of F 1, B 3 that hold 1, but for the shared ones, of B 1, that hold nothing."""
    own = [stage not in shared for stage in range(num_stages)]
    return Costs((1,) * num_stages, tuple(3 if o else 1 for o in own), activation_bytes=tuple(map(int, own)))


def _proven(problem: Problem, objective: str, found: Exact) -> int:
    """The value of orders that pass all checks and meet the bound."""
    plan = problem.to_plan(found.orders)
    check(plan)
    value = simulate(plan).makespan_us if objective == "makespan" else simulate(plan).span_us
    assert found.bound_us == value
    return value


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return list(tiny_cases(some(200), seed=4))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_equals_brute_force(cases: list[Case], objective: str) -> None:
    for placement, num_microbatches, best in cases:
        problem = Problem(placement, num_microbatches)
        found = solve(problem, objective, None, 0, Budget(10, deterministic=True))
        if best is None:
            assert found.orders is None
        else:
            assert _proven(problem, objective, found) == getattr(best, f"{objective}_us"), placement


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_finds_only_what_is_better(cases: list[Case], objective: str) -> None:
    chooser = random.Random(1)
    for placement, num_microbatches, best in cases:
        if best is None:
            continue
        problem = Problem(placement, num_microbatches)
        orders = problem.to_orders(chooser.choice(best.fitting))
        timed, least = score(problem, orders), getattr(best, f"{objective}_us")
        found = solve(problem, objective, orders, 0, Budget(10, deterministic=True))
        if getattr(timed, f"{objective}_us") == least:
            assert (found.orders, found.bound_us) == (None, least)
        else:
            assert _proven(problem, objective, found) == least


@pytest.mark.parametrize(
    ("placement", "num_microbatches", "makespan_us"),
    [
        (v_shape(Costs.uniform(4, **_UNIT), Cluster.uniform(4, 3)), 8, 52),
        (x_shape(Costs.uniform(4, **_UNIT), Cluster.uniform(4, 4)), 6, 30),
        (k_shape(Costs((1,) * 5, (3,) * 4 + (1,), activation_bytes=1), Cluster.uniform(4, 6)), 4, 28),
        (m_shape(_shared(5, 0), Cluster.uniform(4, 3)), 4, 40),
        (nn_shape(_shared(6, 0, 3), Cluster.uniform(4, 6)), 3, 36),
    ],
    ids=["V", "X", "K", "M", "NN"],
)
def test_shapes_are_proven(placement: Placement, num_microbatches: int, makespan_us: int) -> None:
    problem = Problem(placement, num_microbatches)
    found = solve(problem, "makespan", None, 0, Budget(30, deterministic=True))
    assert _proven(problem, "makespan", found) == makespan_us


def test_without_time_nothing_is_claimed() -> None:
    problem = Problem(v_shape(Costs.uniform(4, **_UNIT), Cluster.uniform(4, 4)), 8)
    found = solve(problem, "makespan", None, 5, Budget(0))
    assert found.orders is None
    assert 5 <= found.bound_us <= 44


def test_a_solver_that_does_not_end_in_time_raises_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a solver may still simplify its model when the search is over; it is then left alone."""
    monkeypatch.setattr(cpsat, "_MOST_STOPPING_S", 0.0)
    problem = Problem(v_shape(Costs.uniform(4, **_UNIT), Cluster.uniform(4, 4)), 12)
    assert solve(problem, "makespan", None, 7, Budget(0.0)) == Exact(None, 7)


# --- steps whose transfers hold memory: equal to trying all orders, and nothing is refused that has a plan ------------


@pytest.fixture(scope="module")
def carrying() -> list[Case]:
    return list(tiny_cases(some(150), seed=11, carries=True))


def in_turn(case: Case, objective: str) -> int | None:
    """The best of all orders in which each task does its micro-batches in turn; None: none fits."""
    plans = [] if case.best is None else case.best.fitting
    return min((getattr(simulate(plan), f"{objective}_us") for plan in plans), default=None)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_equals_brute_force_with_transfers(carrying: list[Case], objective: str) -> None:
    for case in carrying:
        problem = Problem(case.placement, case.num_microbatches)
        budget = Budget(10, deterministic=True)
        found = solve(problem, objective, None, 0, budget, transfers="as in a plan")  # type: ignore[arg-type]
        least = in_turn(case, objective)
        assert found.is_complete
        if least is None:
            assert found.orders is None
            assert found.bound_us > longest_us(problem)
        else:
            plan = problem.to_plan(found.orders)
            check(plan)
            assert getattr(simulate(plan), f"{objective}_us") == found.bound_us == least, case.placement


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_with_waits_it_is_a_bound_for_every_plan(carrying: list[Case], objective: str) -> None:
    """Also for plans out of turn, which brute force tries too."""
    none_fits = 0
    for case in carrying:
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
def test_the_search_finds_the_best_and_refuses_nothing_that_has_a_plan(carrying: list[Case], objective: str) -> None:
    refused = 0
    for case in carrying:
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
        assert result.bound_us <= getattr(case.best, f"{objective}_us"), case.placement
    assert refused > 5 or not IS_WHOLE
