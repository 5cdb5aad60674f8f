"""A step with a middle that repeats: least period, shortest whole, and any number of periods in between."""

from dataclasses import replace
from itertools import accumulate, pairwise, product
from random import Random

import pytest
from hypothesis import assume, given, settings

from rota import Cluster, Costs, SearchError, bidirectional, check, find_plan, place, simulate
from rota.search import Repeating, bounds_of, find_repeating
from rota.search.problem import Problem
from support.core_strategies import placed
from support.sampling import some
from support.search_brute_force import best_of, every_plan, tiny_placement
from support.tessel_shapes import tessel


def found(placement, num_microbatches=None, time_limit_s=10.0) -> Repeating:
    return find_repeating(placement, num_microbatches, time_limit_s=time_limit_s)


def require_true(step: Repeating) -> None:
    """Data is there, ranks do one thing at a time and hold what they may, and it is the plan that says so."""
    placement = step.placement
    tasks = placement.tasks
    for (source, target), lag in Problem(placement, 1).lags_us.items():
        for made, read in zip(step.starts_us[source], step.starts_us[target], strict=True):
            assert read >= made + tasks[source].duration_us + lag
    for rank in range(placement.num_ranks):
        on = [i for i, task in enumerate(tasks) if rank in task.ranks]
        spans = sorted((start, start + tasks[i].duration_us) for i in on for start in step.starts_us[i])
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    check(step.plan)
    alone = replace(step.plan, placement=replace(placement, step_ends=()))
    assert bounds_of(alone.placement, alone.num_microbatches)[0].us <= simulate(alone).makespan_us == step.makespan_us


@pytest.mark.parametrize(
    ("shape", "limit", "rounds", "period_us", "makespan_us"),
    [
        *(("v", 4, 1, 16, 16), ("v", 4, 3, 8, 24), ("v", 4, 4, 4, 28), ("v", 4, 6, 4, 36), ("v", 3, 6, 8, 40)),
        *(("x", 4, 3, 8, 30), ("m", 6, 3, 10, 34), ("m", 6, 6, 6, 48), ("nn", 6, 3, 12, 40), ("k", 6, 6, 6, 40)),
    ],
)
def test_proven_least_period_and_shortest_whole(shape, limit, rounds, period_us, makespan_us) -> None:
    placement = tessel(shape, 4, limit)
    step = found(placement, rounds * placement.num_components)
    assert (step.period_us, step.makespan_us) == (period_us, makespan_us)
    assert step.is_least
    assert step.is_optimal
    assert step.num_microbatches == rounds * placement.num_components
    require_true(step)
    for more in (1, 2, 7):
        longer = step.unroll(step.num_microbatches + more * placement.num_components)
        assert longer.makespan_us == step.makespan_us + more * step.period_us
        require_true(longer)


@pytest.mark.parametrize(("shape", "limit", "rounds"), [("v", 4, 6), ("x", 4, 3), ("m", 6, 6), ("k", 6, 4)])
def test_no_plan_at_all_is_shorter_where_there_are_enough_micro_batches(shape, limit, rounds) -> None:
    placement = tessel(shape, 4, limit)
    best = find_plan(placement, rounds * placement.num_components, time_limit_s=5, deterministic=True)
    assert best.is_optimal
    assert found(placement, rounds * placement.num_components).makespan_us == best.makespan_us


@pytest.mark.parametrize(("shape", "limit", "rounds", "period_us"), [("v", 4, 4, 4), ("v", 3, 2, 8), ("k", 6, 3, 6)])
def test_the_fewest_micro_batches_of_the_least_period(shape, limit, rounds, period_us) -> None:
    step = found(tessel(shape, 4, limit))
    assert (step.num_microbatches, step.period_us) == (rounds, period_us)


def test_inference_repeats_with_one_micro_batch_as_each_rank_may_be_a_stage_later() -> None:
    step = found(tessel("v", 4, 4).forward_only(), 1)
    assert (step.period_us, step.makespan_us) == (1, 4)
    assert step.unroll(100).makespan_us == 103
    require_true(step.unroll(100))


def test_lags_and_step_ends() -> None:
    costs = Costs.uniform(3, 5, 7, boundary_bytes=0, reduce_us=3, optimizer_us=2)
    placement = place(costs, Cluster.uniform(3, latency_us=4))
    step = found(placement, 8)
    assert step.period_us == 12
    require_true(step)
    assert simulate(step.plan).makespan_us <= step.makespan_us + 5


def brute_force_period(times: tuple[int, int, int, int], limit: int, in_flight: int) -> int:
    """Of two stages F0 F1 B1 B0 on two ranks: the least period by trying all starts and all cuts."""
    ranks, held, longest = (0, 1, 1, 0), (1, 1, -1, -1), sum(times)

    def fits(starts: tuple[int, ...], T: int) -> bool:
        for rank in range(2):
            on = [i for i in range(4) if ranks[i] == rank]
            spans = sorted((starts[i] + m * T, starts[i] + m * T + times[i], held[i]) for i in on for m in range(9))
            if any(end > start for (_, end, _), (start, _, _) in pairwise(spans)):
                return False
            if max(accumulate(size for *_, size in spans)) > limit:
                return False
        cuts = [[turns(starts, rank, cut, T) for cut in range(T)] for rank in range(2)]
        shifts = range(-longest, longest + 1)
        return any(
            max(*a, *(q + shift for q in b)) - min(*a, *(q + shift for q in b)) < in_flight
            for a, b in product(*cuts)
            if a and b
            for shift in shifts
        )

    def turns(starts: tuple[int, ...], rank: int, cut: int, T: int) -> list[int]:
        on = [i for i in range(4) if ranks[i] == rank]
        whole = all((starts[i] - cut) % T + times[i] <= T for i in on)
        return [(starts[i] - cut) // T for i in on] if whole else []

    for T in range(1, longest + 1):
        waits = product(range(T), repeat=3)  # what waits a period longer is no better here
        rows = (tuple(accumulate(zip(times, wait, strict=False), step, initial=0)) for wait in waits)
        if any(fits(starts, T) for starts in rows):
            return T
    raise AssertionError


def step(start: int, of: tuple[int, int]) -> int:
    return start + of[0] + of[1]


@pytest.mark.parametrize("times", [(1, 1, 1, 1), (1, 1, 2, 2), (1, 2, 1, 3), (2, 1, 3, 1), (1, 3, 1, 1)])
@pytest.mark.parametrize(("limit", "in_flight"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (2, 3), (9, 3)])
def test_no_shorter_period_by_brute_force(times: tuple[int, int, int, int], limit: int, in_flight: int) -> None:
    costs = Costs(times[:2], (times[3], times[2]), activation_bytes=1)
    step = found(place(costs, Cluster.uniform(2, limit)), in_flight)
    assert step.is_least
    assert step.period_us == brute_force_period(times, limit, in_flight)


@settings(max_examples=some(25))
@given(placed())
def test_any_placement(placement) -> None:
    placement = replace(
        placement,
        tasks=tuple(replace(task, duration_us=max(task.duration_us, 1)) for task in placement.tasks),
        edges=tuple(edge._replace(num_bytes=0) for edge in placement.edges),
        step_ends=(),
    )
    step = find_repeating(placement, 3 * placement.num_components, time_limit_s=0.5)
    assume(step is not None)
    require_true(step)
    require_true(step.unroll(5 * placement.num_components))


def test_the_makespan_is_the_plans_and_no_repeating_step_of_the_period_is_shorter() -> None:
    """Alone, a step may run faster than with the times at which its middle repeats; all DAGs, all orders."""
    chooser, num_proven = Random(3), 0
    for _ in range(some(250)):
        placement = tiny_placement(chooser)
        lasting = tuple(replace(task, duration_us=max(task.duration_us, 1)) for task in placement.tasks)
        placement = replace(placement, tasks=lasting, step_ends=())
        step = find_repeating(placement, chooser.randint(1, 4) * placement.num_components, time_limit_s=0.3)
        if step is not None:
            require_true(step)
            num_proven += step.is_optimal
            plans = every_plan(placement, step.num_microbatches)
            best = best_of(plans) if plans else None
            assert best is None or best.makespan_us <= step.makespan_us
    assert num_proven > 0.18 * some(250)


def test_nothing_fits() -> None:
    assert find_repeating(tessel("v", 4, 0), 4) is None
    assert find_repeating(tessel("v", 4, 0)) is None


def test_what_grows_for_ever_does_not_repeat() -> None:
    placement = tessel("v", 2, 9)
    keeps = tuple(replace(task, held_bytes=abs(task.held_bytes)) for task in placement.tasks)
    assert find_repeating(replace(placement, tasks=keeps), 2) is None


def test_errors() -> None:
    x = bidirectional(Costs.uniform(2), Cluster.uniform(2))
    with pytest.raises(SearchError, match="num_microbatches is 3; give 2 or a multiple of it"):
        find_repeating(x, 3)
    with pytest.raises(SearchError, match="has 2 micro-batches, and can take any number of 2 more"):
        found(x, 2).unroll(1)
    with pytest.raises(SearchError, match="task 0F takes no time"):
        find_repeating(place(Costs.uniform(2, 0, 1), Cluster.uniform(2)), 2)
    with pytest.raises(SearchError, match="0F -> 1F holds 5 bytes on rank 0, which has a limit"):
        find_repeating(place(Costs.uniform(2, 1, 1, boundary_bytes=5), Cluster.uniform(2, 99)), 2)
    with pytest.raises(SearchError, match="time_limit_s is 0"):
        find_repeating(x, 2, time_limit_s=0)
