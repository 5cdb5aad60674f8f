"""All states of long steps, round by round: the optimum, its plan, and bounds before all rounds are done."""

import pytest

from rota import Cluster, Costs, Edge, Kind, Placement, Task, check, place, shapes, simulate
from rota.core.tasks import scalar
from rota.search import bounds, exact
from rota.search.budget import Budget
from rota.search.exact.rounds import Rounds
from rota.search.problem import Problem
from rota.search.timing import fits
from support.sampling import swept
from support.search_brute_force import every_plan, limited_steps
from support.tessel_shapes import tessel


def solved(problem: Problem) -> Rounds:
    """The whole search."""
    rounds = Rounds(problem)
    assert not rounds.is_over
    rounds.run(1 << 60, Budget(60, deterministic=True))
    assert rounds.is_over
    return rounds


def check_against_every_plan(seed: int, most: int) -> tuple[int, int]:
    """(problems checked, of these with the exact optimum) for one random placement, under several limits."""
    limited = limited_steps(seed, most)[1:3]
    if not limited:
        return 0, 0
    placement = limited[0][0].placement
    is_exact = placement.num_components == 1
    is_exact = is_exact and not any(end.reduce_us or end.optimizer_us for end in placement.step_ends)
    is_exact = is_exact and not any(route.num_bytes or route.duration_us for route in placement.routes)
    for rank in range(placement.num_ranks):  # states do not know what complete micro-batches still hold
        is_exact = is_exact and sum(scalar(task.held_bytes) for task in placement.tasks if rank in task.ranks) == 0
    checked = met = 0
    for problem, fitting in limited:
        least_us = min(timeline.makespan_us for timeline in fitting)
        if Rounds(problem).is_over:
            continue
        rounds = solved(problem)
        assert rounds.bound_us <= least_us, (seed, problem.limits_bytes, rounds.bound_us, least_us)
        checked += 1
        if is_exact and rounds.bound_us:  # 0: there were too many states
            assert rounds.bound_us == least_us, (seed, problem.limits_bytes)
            assert fits(problem, rounds.orders)
            assert simulate(problem.to_plan(rounds.orders)).makespan_us == least_us
            met += 1
    return checked, met


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("seeds", "most", "least_checked", "least_met"),
    [(range(40), 60, 15, 2), swept(range(1_000, 11_000), 20, 4_500, 700)],
)
def test_the_bound_is_never_above_the_best_of_all_orders_and_exact_without_transfers_and_step_ends(
    seeds: range, most: int, least_checked: int, least_met: int
) -> None:
    checked, met = map(sum, zip(*(check_against_every_plan(seed, most) for seed in seeds), strict=True))
    assert checked > least_checked
    assert met > least_met


def test_a_wait_on_purpose_for_memory_is_found() -> None:
    """A rank with room for one micro-batch of two streams has to keep it free for the stream that is further."""
    placement = shapes.x_shape(Costs((2, 1, 3), (4, 3, 5), activation_bytes=1), Cluster.uniform(3, 1))
    problem = Problem(placement, 4)
    rounds = solved(problem)
    assert simulate(problem.to_plan(rounds.orders)).makespan_us == rounds.bound_us


@pytest.mark.parametrize(
    ("shape", "num_ranks", "limit", "num_microbatches", "us"),
    [
        *(("x", 4, 2, 8, 55), ("x", 4, 2, 16, 107), ("x", 2, 1, 8, 57), ("nn", 4, 3, 8, 89)),
        *(("nn", 4, 3, 128, 1349), ("nn", 8, 3, 64, 995), ("m", 4, 3, 128, 948)),
    ],
)
def test_long_steps_are_solved(shape: str, num_ranks: int, limit: int, num_microbatches: int, us: int) -> None:
    problem = Problem(tessel(shape, num_ranks, limit), num_microbatches)
    rounds = solved(problem)
    assert rounds.bound_us == us >= bounds.best(problem).us
    plan = problem.to_plan(rounds.orders)
    check(plan)
    assert simulate(plan).makespan_us == us


def test_times_that_are_no_small_numbers() -> None:
    costs = Costs((18_500, 21_001, 7), (30_011, 29_850, 1_000_003), (5, 44_444, 18_500), activation_bytes=2)
    problem = Problem(place(costs, Cluster.uniform(3, 4)), 3)
    rounds = solved(problem)
    proven = exact.solve(problem, "makespan", None, 0, Budget(60, deterministic=True), seed=0)
    assert proven.bound_us == rounds.bound_us
    assert simulate(problem.to_plan(rounds.orders)).makespan_us == rounds.bound_us


@pytest.mark.parametrize("limit", [None, 30])
def test_steps_with_too_many_states_are_left_alone(limit: int | None) -> None:
    assert Rounds(Problem(tessel("x", 8, limit), 64)).is_over


def test_micro_batches_that_free_more_than_they_take_are_left_alone() -> None:
    """Each of them leaves more room for the next ones, which states do not count: the bound would be 15 µs."""
    tasks = (Task(1, Kind.B, (0,), 3, 1), Task(1, Kind.F, (1,), 2, -1), Task(2, Kind.B, (0,), 0, -2))
    placement = Placement(tasks, (Edge(0, 1), Edge(1, 2)), Cluster((1, 0)))
    timelines = map(simulate, every_plan(placement, 3, in_order=True))
    assert min(timeline.makespan_us for timeline in timelines if timeline.peak_memory_bytes[0] <= 1) == 13
    assert Rounds(Problem(placement, 3)).is_over


def test_no_room_for_more_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rota.search.exact.rounds._MOST_BYTES", 100_000)
    rounds = Rounds(Problem(tessel("x", 4, 3), 64))
    rounds.run(1 << 60, Budget(60, deterministic=True))
    assert rounds.is_over
    assert rounds.bound_us == 0
    assert rounds.orders is None
