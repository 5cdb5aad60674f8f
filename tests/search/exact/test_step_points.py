"""What is known about points of time in a whole step holds in every plan that fits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product

import pytest
from ortools.sat.python import cp_model

from rota import Cluster, Costs, place
from rota.search.critical_path import CriticalPath
from rota.search.exact import longest_us, whole_step
from rota.search.exact.ordering import Ordering
from rota.search.exact.step_points import Gaps, StepPoints
from rota.search.problem import Problem
from rota.search.transfer_levels import counting_transfers
from support.search_brute_force import tiny_cases

_LAGS_US = (0, 1, 4)  # after the ends of nodes


def ordering_of(problem: Problem) -> Ordering:
    counted = counting_transfers(problem)
    window, _ = whole_step(CriticalPath(counted, False), None)
    return Ordering(window, 0, longest_us(problem))


@pytest.fixture(scope="module")
def plans() -> list[tuple[Problem, list[int]]]:
    """Problems, each with the ticks at which its nodes start in a plan that fits."""

    def some() -> Iterator[tuple[Problem, list[int]]]:
        for case in tiny_cases(15, seed=5, carries=True):
            problem = Problem(case.placement, case.num_microbatches)
            for plan in [] if case.best is None else case.best.fitting[::3]:
                paths = CriticalPath(counting_transfers(problem), False).paths(problem.to_orders(plan))
                assert paths is not None
                yield problem, paths.starts.tolist()

    return list(some())


def test_gaps_hold(plans: list[tuple[Problem, list[int]]]) -> None:
    assert len(plans) > 20
    tight = 0
    for problem, starts in plans:
        gaps = Gaps(ordering_of(problem))
        for a, b in product(range(len(starts)), repeat=2):
            assert gaps.least(a, b) <= starts[b] - starts[a]
            tight += a != b and gaps.least(a, b) == starts[b] - starts[a]
    assert tight > len(plans)


def test_literals_say_which_point_comes_first(plans: list[tuple[Problem, list[int]]]) -> None:
    """Also beside all that they say about each other: the model with the starts of the plan has a solution."""
    known = open_ = 0
    for problem, starts in islice(plans, 0, None, 3):
        ordering = ordering_of(problem)
        points = StepPoints(ordering, Gaps(ordering), longest_us(problem) + max(_LAGS_US))
        places = {(node, start): points.start(node) for node, start in enumerate(starts)}
        for node, lag_us in product(range(len(starts)), _LAGS_US):
            ticks = starts[node] + ordering.window.lengths[node] + lag_us * ordering.ticks
            places[node, ticks] = points.end(node, lag_us)
        literals = {(a, b): points.is_until(places[a], places[b]) for a, b in product(places, repeat=2)}
        points.add_implications()
        for node, start in ordering.starts.items():
            ordering.model.add(start == starts[node])
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        assert solver.solve(ordering.model) == cp_model.OPTIMAL, problem.given
        for ((_, early), (_, late)), literal in literals.items():
            assert solver.value(literal) == (early // ordering.ticks <= late // ordering.ticks)
            known, open_ = known + isinstance(literal, int), open_ + (not isinstance(literal, int))
    assert known > open_ > 0


def test_nothing_is_asked_where_data_decide() -> None:
    problem = Problem(place(Costs((2, 2), (3, 3), boundary_bytes=1), Cluster.uniform(2, latency_us=1)), 3)
    ordering = ordering_of(problem)
    points = StepPoints(ordering, Gaps(ordering), longest_us(problem))
    forward, backward = (problem.first_node[task] for task in (0, problem.topological[-1]))
    assert points.is_until(points.end(forward, 0), points.start(backward)) == 1
    assert points.is_until(points.start(backward), points.end(forward, 6)) == 0
    assert points.is_until(points.start(forward), points.start(forward + 1)) == 1
    assert not isinstance(points.is_until(points.start(forward + 1), points.start(backward)), int)
