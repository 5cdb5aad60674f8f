"""The whole step as one model: equal to trying all orders, and proven."""

import random

import pytest

from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.placement import Placement
from rota.core.simulation import check, simulate
from rota.search.budget import Budget
from rota.search.exact import Exact, cpsat, solve
from rota.search.problem import Problem
from rota.search.timing import score
from rota.shapes import k_shape, m_shape, nn_shape, v_shape, x_shape
from support.sampling import some
from support.search_brute_force import Case, tiny_cases

_UNIT = {"forward_us": 1, "backward_us": 3, "activation_bytes": 1}


def _shared(num_stages: int, *shared: int) -> Costs:
    """Stages of F 1, B 3 that hold 1, but for the shared ones, of B 1, that hold nothing."""
    own = [stage not in shared for stage in range(num_stages)]
    return Costs((1,) * num_stages, tuple(3 if o else 1 for o in own), activation_bytes=tuple(map(int, own)))


def _proven(problem: Problem, objective: str, found: Exact) -> int:
    """The value of orders that pass all checks and meet the bound."""
    assert found.orders is not None
    plan = problem.to_plan(found.orders)
    check(plan)
    value = simulate(plan).makespan_us if objective == "makespan" else simulate(plan).span_us
    assert found.bound_us == value
    return value


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return list(tiny_cases(some(200), seed=4))


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_equals_brute_force(cases: list[Case], objective: str) -> None:
    for placement, num_microbatches, best in cases:
        problem = Problem(placement, num_microbatches)
        found = solve(problem, objective, None, 0, Budget(10, deterministic=True))
        if best is None:
            assert found.orders is None
        else:
            assert _proven(problem, objective, found) == getattr(best, f"{objective}_us"), placement


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_finds_only_what_is_better(cases: list[Case], objective: str) -> None:
    chooser = random.Random(1)
    for placement, num_microbatches, best in cases:
        if best is None:
            continue
        problem = Problem(placement, num_microbatches)
        orders = problem.to_orders(chooser.choice(best.fitting))
        timed, least = score(problem, orders), getattr(best, f"{objective}_us")
        assert timed is not None
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
