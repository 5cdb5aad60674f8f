"""Schedules of a chain that turns at the last rank and comes back: ZB-V, DualPipeV, V-Half and V-Min, Hanayo."""

import re
from collections.abc import Callable
from itertools import accumulate

import pytest
from hypothesis import given, settings, strategies as st

from rota import Cluster, Costs, Kind, Placement, Plan, ScheduleError, check, interleaved, place, simulate, wave
from rota.schedules.controllable_memory import v_half, v_min
from rota.schedules.dualpipe import dualpipe_v
from rota.schedules.hanayo import hanayo
from rota.schedules.zero_bubble import zb_v
from support.sampling import MOST_RANKS, microbatches, some

Schedule = Callable[[Placement, int], Plan]
LIMITS: dict[Schedule, Callable[[int], int]] = {
    zb_v: lambda p: 2 * p,
    dualpipe_v: lambda p: 2 * p + 1,
    v_half: lambda p: 2 * ((p + 2) // 2),
    v_min: lambda p: 2 * ((p + 4) // 3),
}


def split(num_ranks: int, forward_us: int = 1, input_us: int = 1, weight_us: int = 1, latency_us: int = 0) -> Placement:
    """A V with a split backward, in which each stage holds 2 bytes a micro-batch, of which I frees one."""
    costs = Costs.uniform(2 * num_ranks, forward_us, input_us, weight_us, activation_bytes=2)
    return wave(costs, Cluster.uniform(num_ranks, latency_us=latency_us))


def waves(num_ranks: int, num_waves: int, forward_us: int = 1, backward_us: int = 2) -> Placement:
    costs = Costs.uniform(2 * num_waves * num_ranks, forward_us, backward_us)
    return wave(costs, Cluster.uniform(num_ranks))


def most_held(plan: Plan) -> int:
    """The most activations of a stage that any rank keeps at once."""
    steps = {Kind.F: 1, Kind.W: -1, Kind.B: -1}
    held = (accumulate(steps.get(op.kind, 0) for op in order) for order in plan.orders)
    return max(max(levels) for levels in held)


@pytest.mark.parametrize("schedule", LIMITS, ids=lambda schedule: schedule.__name__)
def test_every_size_of_a_v(schedule: Schedule) -> None:
    for num_ranks in range(1, MOST_RANKS + 1):
        placement = split(num_ranks, 7, 6, 5)
        for num_microbatches in microbatches(num_ranks):
            try:
                plan = schedule(placement, num_microbatches)
            except ScheduleError as error:
                told = re.fullmatch(r"dualpipe_v: .*; give (\d+) or more, two per rank", str(error))
                assert int(told[1]) > num_microbatches
                check(schedule(placement, int(told[1])))
            else:
                check(plan)
                assert most_held(plan) <= LIMITS[schedule](num_ranks)


@pytest.mark.parametrize("num_waves", [1, 2, 3])
def test_every_size_of_waves(num_waves: int) -> None:
    for num_ranks in range(1, MOST_RANKS + 1):
        placement = waves(num_ranks, num_waves)
        for num_microbatches in microbatches(num_ranks):
            plan = hanayo(placement, num_microbatches)
            check(plan)
            assert most_held(plan) <= 2 * num_waves * min(num_ranks, num_microbatches)


times = st.integers(0, 9)
schedules = st.sampled_from([zb_v, dualpipe_v, v_half, v_min, hanayo])


@given(schedules, st.data(), st.integers(1, 5), st.integers(0, 8), st.integers(0, 20), st.booleans())
@settings(max_examples=some(150))
def test_any_costs(
    schedule: Schedule, data: st.DataObject, num_ranks: int, more: int, latency_us: int, recomputes: bool
) -> None:
    """Ops that take no time, slow transfers and forwards done again included."""
    forward, backward, weight = data.draw(st.tuples(*[st.tuples(*[times] * (2 * num_ranks))] * 3))
    costs = Costs(forward, backward, weight, boundary_bytes=3, recompute_us=forward if recomputes else None)
    placement = wave(costs, Cluster.uniform(num_ranks, latency_us=latency_us))
    plan = schedule(placement, more + (2 * num_ranks if schedule is dualpipe_v else 1))
    check(plan)
    if schedule in LIMITS:
        assert most_held(plan) <= LIMITS[schedule](num_ranks)


@given(st.data(), st.integers(1, 4), st.integers(1, 2), st.integers(1, 9), st.booleans())
def test_any_waves(data: st.DataObject, num_ranks: int, num_waves: int, num_microbatches: int, is_split: bool) -> None:
    forward, backward, weight = data.draw(st.tuples(*[st.tuples(*[times] * (2 * num_waves * num_ranks))] * 3))
    costs = Costs(forward, backward, weight if is_split else None, recompute_us=(3, *[None] * (len(forward) - 1)))
    plan = hanayo(wave(costs, Cluster.uniform(num_ranks, latency_us=1)), num_microbatches)
    check(plan)
    assert most_held(plan) <= 2 * num_waves * num_ranks


@pytest.mark.parametrize("num_ranks", range(2, MOST_RANKS + 1))
@pytest.mark.parametrize(("ours", "theirs"), [(zb_v, "ScheduleZBVZeroBubble"), (dualpipe_v, "ScheduleDualPipeV")])
def test_orders_are_pytorchs(ours: Schedule, theirs: str, num_ranks: int) -> None:
    from support.torch_orders import torch_orders

    compared = 0
    for num_microbatches in (1, 2, num_ranks, *range(2 * num_ranks - 2, 2 * num_ranks + 3), 3 * num_ranks + 1, 24):
        orders = torch_orders(theirs, num_ranks, 2, num_microbatches)
        if orders is not None:
            expected = [[part for op in order for part in without_b(op)] for order in orders]
            assert [list(map(str, order)) for order in ours(split(num_ranks), num_microbatches).orders] == expected
            compared += 1
    assert compared >= 5


def without_b(op: str) -> list[str]:
    """A whole backward is I and W here."""
    return [op.replace("B", "I"), op.replace("B", "W")] if "B" in op else [op]


@pytest.mark.parametrize("num_ranks", range(1, MOST_RANKS + 1))
def test_zb_v_has_no_bubble_in_the_memory_of_1f1b(num_ranks: int) -> None:
    for num_microbatches in (2 * num_ranks - 1, 2 * num_ranks, 3 * num_ranks + 1):
        timeline = simulate(zb_v(split(num_ranks), num_microbatches))
        assert timeline.span_us == 6 * num_microbatches  # no rank waits once it has begun
        assert timeline.makespan_us == 6 * num_microbatches + num_ranks - 1
        assert set(timeline.peak_memory_bytes) == {2 * 2 * num_ranks}  # 1F1B: p micro-batches of two stages


@pytest.mark.parametrize(
    ("num_ranks", "half", "least"), [(4, (6, 53), (4, 59)), (8, (10, 113), (8, 119)), (16, (18, 233), (12, 251))]
)
def test_v_half_and_v_min_are_as_published(num_ranks: int, half: tuple[int, int], least: tuple[int, int]) -> None:
    """(most activations held, makespan) of the authors' own search, where all ops take one slot."""
    for schedule, published in ((v_half, half), (v_min, least)):
        plan = schedule(split(num_ranks), 2 * num_ranks)
        assert (most_held(plan), simulate(plan).makespan_us) == published


@pytest.mark.parametrize(
    ("schedule", "times_us", "authors_us"),
    [
        (v_half, (925, 905, 465, 60), 132_685),
        (v_half, (14_925, 14_885, 9_435, 470), 2_209_175),
        (v_min, (925, 905, 465, 60), 157_215),
        (v_min, (14_925, 14_885, 9_435, 470), 2_504_465),
    ],
)
def test_v_half_and_v_min_are_no_slower_than_the_authors_at_measured_costs(
    schedule: Schedule, times_us: tuple[int, int, int, int], authors_us: int
) -> None:
    """8 ranks, 24 micro-batches; the authors' makespans at the same memory."""
    assert simulate(schedule(split(8, *times_us), 24)).makespan_us <= authors_us


SHAPE = "place it by rota.wave(costs, cluster), with two stages per rank"


@pytest.mark.parametrize("schedule", LIMITS, ids=lambda schedule: schedule.__name__)
def test_what_is_no_v_is_refused(schedule: Schedule) -> None:
    name = schedule.__name__
    cluster = Cluster.uniform(2)
    for placement, told in (
        (place(Costs.uniform(2, 1, 1, 1), cluster), f"needs a chain of stages; {SHAPE}"),
        (interleaved(Costs.uniform(4, 1, 1, 1), cluster), f"stage 2 is on rank 0, but belongs on rank 1; {SHAPE}"),
        (wave(Costs.uniform(4), cluster), "stage 0 has no I and W; give the costs weight_us, to split the backward"),
    ):
        with pytest.raises(ScheduleError) as caught:
            schedule(placement, 8)
        assert str(caught.value) == f"{name}: {told}"


def test_what_makes_no_whole_waves_is_refused() -> None:
    dealt = interleaved(Costs.uniform(6), Cluster.uniform(2))
    with pytest.raises(ScheduleError, match=r"hanayo: 6 stages do not go round 2 ranks; place a multiple of 4 stages"):
        hanayo(dealt, 2)
    with pytest.raises(ScheduleError, match=r"hanayo: the placement has no backward; use forward_only"):
        hanayo(split(2).forward_only(), 2)
