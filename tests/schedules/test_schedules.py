"""The named schedules: valid everywhere they are defined, as fast and as small as published, and as PyTorch's."""

from collections.abc import Callable
from itertools import accumulate

import pytest
from hypothesis import assume, given, settings, strategies as st

from rota import Cluster, Costs, Kind, Placement, Plan, ScheduleError, check, place, simulate
from rota.schedules import forward_only, gpipe, one_f_one_b
from support.core_strategies import costs, placed, raw
from support.sampling import some

Schedule = Callable[[Placement, int], Plan]
FORWARD_US, BACKWARD_US = 3, 5
counts = st.integers(1, 6)


def chain(num_ranks: int, weight_us: int | None = None) -> Placement:
    given = Costs.uniform(num_ranks, FORWARD_US, BACKWARD_US - (weight_us or 0), weight_us)
    return place(given, Cluster.uniform(num_ranks))


def most_in_flight(plan: Plan, rank: int) -> int:
    """Micro-batches whose forward has run and whose last backward has not."""
    steps = {Kind.F: 1, Kind.B: -1, Kind.I: 0, Kind.W: -1}
    return max(accumulate(steps[op.kind] for op in plan.orders[rank]), default=0)


@pytest.mark.parametrize("weight_us", [None, 2], ids=["B", "I and W"])
@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
def test_chains_take_the_published_time_and_memory(schedule: Schedule, num_ranks: int, weight_us: int | None) -> None:
    for num_microbatches in range(1, 13):
        plan = schedule(chain(num_ranks, weight_us), num_microbatches)
        check(plan)
        published = (num_microbatches + num_ranks - 1) * (FORWARD_US + BACKWARD_US)
        sooner = (num_ranks - 1) * (weight_us or 0)  # the next rank need not wait for W
        assert simulate(plan).makespan_us == published - sooner
        for rank in range(num_ranks):
            few = min(num_ranks - rank, num_microbatches)
            assert most_in_flight(plan, rank) == (num_microbatches if schedule is gpipe else few)


@st.composite
def one_stage_a_rank(draw: st.DrawFn) -> Placement:
    """Random stages and edges; each rank has at most one stage, a stage sometimes several ranks."""
    given = draw(costs(most_stages=7))
    cluster = Cluster.uniform(given.num_stages + 3, None, draw(st.integers(0, 3)))
    ranks = draw(st.permutations(range(given.num_stages + 3)))
    several, *rest = draw(st.permutations(range(given.num_stages)))
    on = {stage: (ranks[stage],) for stage in rest} | {several: (ranks[several], *ranks[given.num_stages :])}
    return place(given, cluster, [on[stage] for stage in range(given.num_stages)])


@given(one_stage_a_rank(), counts)
@settings(max_examples=some(100))
def test_1f1b_takes_any_dag_of_stages(placement: Placement, num_microbatches: int) -> None:
    plan = one_f_one_b(placement, num_microbatches)
    check(plan)
    for stage in placement.stages:
        batches = placement.microbatches(stage, num_microbatches)
        few = min(ways_on(placement, stage), len(batches))
        assert all(most_in_flight(plan, rank) == few for rank in placement.ranks_of(stage))


def ways_on(placement: Placement, stage: int) -> int:
    """The number of stages on the longest path from `stage` to a last one, both ends included."""
    return 1 + max((ways_on(placement, b) for a, b in placement.stage_edges if a == stage), default=0)


@given(placed(), counts)
@settings(max_examples=some(100))
def test_gpipe_takes_any_stages_on_any_ranks(placement: Placement, num_microbatches: int) -> None:
    check(gpipe(placement, num_microbatches))


@given(placed() | raw(), counts)
@settings(max_examples=some(100))
def test_forward_only_takes_any_forwards(placement: Placement, num_microbatches: int) -> None:
    assume(any(task.kind is Kind.F for task in placement.tasks))
    plan = forward_only(placement.forward_only(), num_microbatches)
    check(plan)
    for order in plan.orders:
        assert [op.microbatch for op in order] == sorted(op.microbatch for op in order)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: one_f_one_b(place(Costs.uniform(4), Cluster.uniform(2), (0, 1, 0, 1)), 2),
            "1f1b: rank 0 has the stages 0, 2, but 1f1b takes one stage per rank; place one stage per rank, "
            "or use interleaved_1f1b or gpipe",
        ),
        (
            lambda: forward_only(chain(2), 2),
            "forward_only: the placement has the task 0B; give it placement.forward_only() instead",
        ),
    ],
)
def test_what_is_not_defined_is_refused(make: Callable[[], Plan], told: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        make()
    assert str(caught.value) == told
