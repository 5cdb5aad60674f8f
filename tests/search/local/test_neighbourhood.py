"""Windows of given orders, reordered: never worse, within memory, and the best where one window is all."""

from __future__ import annotations

import random
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.checking import check
from rota.cluster import Cluster
from rota.costs import Costs
from rota.placing import wave
from rota.search.budget import Budget
from rota.search.critical_path import CriticalPath
from rota.search.local.neighbourhood import improve, reorder, window_at
from rota.search.problem import Orders, Problem
from rota.search.timing import fits, score
from rota.shapes import v_shape
from rota.simulation import simulate
from support.core_strategies import plans
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


def _wave(num_ranks: int, limit: int, num_microbatches: int) -> Problem:
    costs = Costs.uniform(2 * num_ranks, 93, 91, 47, 2, input_frees_bytes=1)
    return Problem(wave(costs, Cluster.uniform(num_ranks, limit, latency_us=6)), num_microbatches)


def _value(problem: Problem, orders: Orders, objective: str = "makespan") -> int:
    timed = score(problem, orders)
    assert timed is not None
    return timed.makespan_us if objective == "makespan" else timed.span_us


@given(plans(most_microbatches=4), st.sampled_from(["makespan", "span"]))
@settings(max_examples=some(40), deadline=None)
def test_heads_and_tails(plan: object, objective: str) -> None:
    """Each way through a node is as long as its head, its length and its tail, and the longest is what is measured."""
    problem = Problem(plan.placement, plan.num_microbatches)  # type: ignore[attr-defined]
    orders, critical_path = _serial(problem), CriticalPath(problem, objective == "span")
    paths = critical_path.paths(orders)
    assert paths is not None
    timeline = simulate(problem.to_plan(orders))
    assert paths.value_us == (timeline.span_us if objective == "span" else timeline.makespan_us)
    assert (paths.starts // critical_path.ticks).tolist() == list(
        timeline.plan.earliest.starts_us[: timeline.plan.num_ops]
    )
    through = paths.starts + critical_path.lengths[problem.task_of] + paths.tails
    assert (through // critical_path.ticks <= paths.value_us).all()
    if not problem.placement.step_ends or objective == "span":
        assert (through // critical_path.ticks).max() == paths.value_us


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


def test_from_one_at_a_time_to_the_best() -> None:
    problem = _v()
    found: list[Orders] = []
    orders = improve(problem, _serial(problem), "makespan", 36, Budget(20, deterministic=True), on_better=found.append)
    values = [_value(problem, better) for better in found]
    assert values[-1] == _value(problem, orders) == 36
    assert values == sorted(set(values), reverse=True)
    assert all(fits(problem, better) for better in found)


def test_stops_at_the_bound() -> None:
    problem = _v()
    orders, budget = _serial(problem), Budget(20, deterministic=True)
    assert improve(problem, orders, "makespan", _value(problem, orders), budget) is orders
    assert budget.spent_s == 0


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_is_the_same_on_every_run(objective: Literal["makespan", "span"]) -> None:
    problem = _wave(3, 8, 5)
    first, second = (
        improve(problem, _serial(problem), objective, 0, Budget(0.5, deterministic=True), seed=5) for _ in range(2)
    )
    assert (first == second).all()
    assert fits(problem, first)
    assert _value(problem, first, objective) < _value(problem, _serial(problem), objective)


def test_a_window_keeps_what_is_held_before_it() -> None:
    """Memory for two: in the second half of the step, with two held before, no further forward comes first."""
    problem = _v(2, 2, 4)
    critical_path = CriticalPath(problem, False)
    orders = improve(problem, _serial(problem), "makespan", 0, Budget(0.1, deterministic=True))
    paths = critical_path.paths(orders)
    assert paths is not None
    for begin in range(int(paths.starts.max()) + 1):
        window = window_at(critical_path, paths, begin, paths.value_us, [True, True])
        _, rows = reorder(window, 0, paths.value_us, Budget(1, deterministic=True), 0)
        assert rows is not None
        kept = [[n for n in row.tolist() if paths.starts[n] < begin] for row in paths.rows]
        assert fits(problem, critical_path.orders([before + row for before, row in zip(kept, rows, strict=True)]))
