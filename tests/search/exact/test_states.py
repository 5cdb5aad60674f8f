"""All states of a step: the best of all orders, found and proven."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from rota import shapes
from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.simulation import simulate
from rota.search import bounds
from rota.search.budget import Budget
from rota.search.exact.rounds import Rounds
from rota.search.exact.states import States
from rota.search.problem import Problem
from rota.search.timing import fits, score
from search.bounds.test_bounds import every_plan, tiny_placement
from support.tessel_shapes import tessel


def searched(problem: Problem, value_us: int, nominal_s: float = 60.0) -> States:
    """The search for less than `value_us`."""
    states = States(problem, bounds.best(problem).us, value_us)
    states.run(value_us, Budget(nominal_s, deterministic=True))
    return states


def check_rounds(problem: Problem, least_us: int, is_exact: bool) -> None:
    """The search round by round on the same problem, where it is for such problems at all."""
    rounds = Rounds(problem)
    if rounds.is_over:
        return
    rounds.run(least_us + 1, Budget(60, deterministic=True))
    assert rounds.bound_us <= least_us
    if is_exact and rounds.bound_us:  # 0: there were too many states
        assert rounds.bound_us == least_us
        assert rounds.orders is not None
        assert fits(problem, rounds.orders)
        timed = score(problem, rounds.orders)
        assert timed is not None
        assert timed.makespan_us == least_us


def check_against_every_plan(seed: int, most: int) -> tuple[int, int]:
    """(problems checked, of these with the exact optimum) for one random placement, under several limits."""
    chooser = Random(seed)
    placement, num_microbatches = tiny_placement(chooser)
    rows = [(t.peak_memory_bytes, t.makespan_us) for t in map(simulate, every_plan(placement, num_microbatches, most))]
    if not rows:
        return 0, 0
    tightest = min(rows, key=lambda row: (sum(row[0]), row[1]))[0]
    is_exact = not any(end.reduce_us or end.optimizer_us for end in placement.step_ends)
    is_exact = is_exact and not any(route.num_bytes or route.duration_us for route in placement.routes)
    checked = exact = 0
    for limits in (None, tightest, chooser.choice(rows)[0]):
        fitting = [us for held, us in rows if limits is None or all(a <= b for a, b in zip(held, limits, strict=True))]
        cluster = replace(placement.cluster, limit_bytes=limits or (None,) * placement.num_ranks)
        problem = Problem(replace(placement, cluster=cluster), num_microbatches)
        least = min(fitting)
        found = searched(problem, least + 3)
        assert found.is_over
        assert found.bound_us <= least, (seed, limits, found.bound_us, least)
        checked += 1
        check_rounds(problem, least, is_exact and placement.num_components == 1)
        if is_exact:
            assert found.bound_us == least, (seed, limits)
            proven = searched(problem, least)
            assert proven.bound_us == least
            assert proven.orders is None
            if found.orders is not None:
                assert fits(problem, found.orders)
                timed = score(problem, found.orders)
                assert timed is not None
                assert timed.makespan_us == least
                exact += 1
    return checked, exact


def test_the_bound_is_never_above_the_best_of_all_orders_and_exact_without_transfers_and_step_ends() -> None:
    counts = [check_against_every_plan(seed, most=120) for seed in range(80)]
    checked, exact = map(sum, zip(*counts, strict=True))
    assert checked > 100
    assert exact > 9


@pytest.mark.sweep
@pytest.mark.timeout(3600)
def test_the_bound_is_never_above_the_best_of_all_orders_in_many_more() -> None:
    checked = sum(check_against_every_plan(seed, most=60)[0] for seed in range(1_000, 11_000))
    assert checked > 10_000


def test_an_unfinished_search_gives_a_bound_and_goes_on() -> None:
    problem = Problem(tessel("x", 4, 2), 16)
    states = States(problem, 85, 107)
    seen = []
    while not states.is_over:
        states.run(107, Budget(0.05, deterministic=True))
        seen.append(states.bound_us)
    assert len(seen) > 3
    assert seen == sorted(seen)
    assert 85 <= seen[0] < seen[-1] == 107


def test_no_room_for_more_states_leaves_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rota.search.exact.states._MOST_BYTES", 4_000_000)
    found = searched(Problem(tessel("x", 4, 2), 64), 440)
    assert found.is_over
    assert found.orders is None
    assert 325 <= found.bound_us < 440


def test_a_wait_on_purpose_for_memory_is_found() -> None:
    """A rank with room for one micro-batch of two streams has to keep it free for the stream that is further."""
    placement = shapes.x_shape(Costs((2, 1, 3), (4, 3, 5), activation_bytes=1), Cluster.uniform(3, 1))
    problem = Problem(placement, 4)
    found = searched(problem, 200)
    assert found.orders is not None
    assert simulate(problem.to_plan(found.orders)).makespan_us == found.bound_us
