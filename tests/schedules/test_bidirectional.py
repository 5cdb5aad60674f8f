"""Schedules of two chains in opposite directions: Chimera and DualPipe."""

import re
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings, strategies as st

from rota import Cluster, Costs, Op, Placement, Plan, ScheduleError, Timeline, check, simulate
from rota.core.placing import bidirectional, place, wave
from rota.schedules.chimera import chimera
from rota.schedules.dualpipe import dualpipe
from support.sampling import some

Schedule = Callable[[Placement, int], Plan]
EVEN = (2, 4, 6, 8)


def both_ways(num_ranks: int, forward_us: int = 1, backward_us: int = 1, weight_us: int | None = None) -> Placement:
    """Each stage holds 2 bytes a micro-batch, of which I frees one."""
    costs = Costs.uniform(num_ranks, forward_us, backward_us, weight_us, activation_bytes=2)
    return bidirectional(costs, Cluster.uniform(num_ranks))


def bubble_us(timeline: Timeline) -> int:
    """Makespan less what a rank does; all do as much."""
    assert len(set(timeline.busy_us)) == 1
    return timeline.makespan_us - timeline.busy_us[0]


@pytest.mark.parametrize("schedule", [chimera, dualpipe])
def test_every_size(schedule: Schedule) -> None:
    for num_ranks in range(1, 9):
        for num_microbatches in range(1, 25):
            try:
                check(schedule(both_ways(num_ranks, 7, 6, 5), num_microbatches))
            except ScheduleError as error:
                nearest = list(advised(str(error), num_ranks, num_microbatches))
                assert nearest
                for ranks, microbatches in nearest:
                    check(schedule(both_ways(ranks, 7, 6, 5), microbatches))
            else:
                assert num_ranks % 2 == num_microbatches % 2 == 0


def advised(told: str, num_ranks: int, num_microbatches: int) -> Iterator[tuple[int, int]]:
    """The sizes that an error says to take; for other ranks, micro-batches that are enough for any schedule."""
    match = re.fullmatch(r"\w+: needs an even number of (ranks|micro-batches), .*; give (\d+)(?: or (\d+))?", told)
    for value in (int(value) for value in match.groups()[1:] if value):
        if match[1] == "ranks":
            assert abs(value - num_ranks) == 1
            yield value, 2 * value
        else:
            assert value > num_microbatches or value == num_microbatches - 1
            yield num_ranks, value


times = st.integers(0, 9)


@given(st.sampled_from([chimera, dualpipe]), st.data(), st.sampled_from(EVEN[:3]), st.integers(0, 4), st.booleans())
@settings(max_examples=some(100))
def test_any_costs(schedule: Schedule, data: st.DataObject, num_ranks: int, more: int, recomputes: bool) -> None:
    forward, backward, weight = data.draw(st.tuples(*[st.tuples(*[times] * num_ranks)] * 3))
    costs = Costs(forward, backward, weight, recompute_us=forward if recomputes else None)
    placement = bidirectional(costs, Cluster.uniform(num_ranks, latency_us=more))
    check(schedule(placement, 2 * (num_ranks + more)))


@pytest.mark.parametrize("schedule", [chimera, dualpipe])
def test_the_directions_mirror_each_other(schedule: Schedule) -> None:
    for num_ranks in EVEN:
        orders = schedule(both_ways(num_ranks, 1, 1, 1), 2 * num_ranks).orders
        for order, mirrored in zip(orders, reversed(orders), strict=True):
            there_and_back = [Op((op.stage + num_ranks) % (2 * num_ranks), op.kind, op.microbatch ^ 1) for op in order]
            assert there_and_back == list(mirrored)


@pytest.mark.parametrize("num_ranks", EVEN)
def test_chimeras_memory(num_ranks: int) -> None:
    """Published: activations of p/2 + 1 to p micro-batches, where 1F1B has 1 to p."""
    for num_microbatches in range(num_ranks, 25, 2):
        peaks = simulate(chimera(both_ways(num_ranks), num_microbatches)).peak_memory_bytes
        assert max(peaks) == 2 * num_ranks
        assert min(peaks) == 2 * (num_ranks // 2 + 1)


@pytest.mark.parametrize("num_ranks", EVEN)
def test_each_half_of_dualpipe_is_pytorchs_dualpipe_v(num_ranks: int) -> None:
    """The steps that DeepSeek published are the same for both; PyTorch's were made from them."""
    from support.torch_orders import torch_orders

    half = num_ranks // 2
    for num_microbatches in (2 * num_ranks, 2 * num_ranks + 2, 3 * num_ranks, 4 * num_ranks):
        orders = dualpipe(both_ways(num_ranks, 1, 1, 1), num_microbatches).orders
        expected = torch_orders("ScheduleDualPipeV", half, 2, num_microbatches // 2)
        for order, theirs in zip(orders, expected, strict=False):
            v_stages = {order[0].stage: min(order[0].stage, num_ranks - 1 - order[0].stage)}
            v_stages[2 * num_ranks - 1 - order[0].stage] = num_ranks - 1 - v_stages[order[0].stage]
            mine = [str(Op(v_stages[op.stage], op.kind, op.microbatch // 2)) for op in order]
            assert mine == [
                part for op in theirs for part in ([op.replace("B", k) for k in "IW"] if "B" in op else [op])
            ]


@pytest.mark.parametrize("num_ranks", EVEN)
@pytest.mark.parametrize("times_us", [(1, 1, 1), (2, 2, 1), (5, 5, 4)])
def test_dualpipes_bubble_and_memory(num_ranks: int, times_us: tuple[int, int, int]) -> None:
    """Published: (p/2 - 1)(F&B + B - 3W), F&B being a pair that runs as one; here its F lets others begin earlier."""
    forward_us, input_us, weight_us = times_us
    backward_us = input_us + weight_us
    for num_microbatches in (2 * num_ranks, 2 * num_ranks + 2, 4 * num_ranks):
        timeline = simulate(dualpipe(both_ways(num_ranks, *times_us), num_microbatches))
        assert bubble_us(timeline) == (num_ranks // 2 - 1) * (forward_us + input_us - weight_us)
        assert bubble_us(timeline) <= (num_ranks // 2 - 1) * (forward_us + 2 * backward_us - 3 * weight_us)
        assert max(timeline.peak_memory_bytes) == 2 * (num_ranks + 1)


@pytest.mark.parametrize("schedule", [chimera, dualpipe])
def test_what_is_not_bidirectional_is_refused(schedule: Schedule) -> None:
    cluster = Cluster.uniform(2)
    one_way = bidirectional(Costs.uniform(2, 1, 1, 1), cluster)
    same = place(Costs.uniform(4, 1, 1, 1, edges=((0, 1), (2, 3))), cluster, (0, 1, 0, 1))
    check(schedule(one_way, 4))
    for placement in (wave(Costs.uniform(4, 1, 1, 1), cluster), place(Costs.uniform(2, 1, 1, 1), cluster), same):
        with pytest.raises(ScheduleError, match=r"needs two chains in opposite directions.*place them by rota\.bid"):
            schedule(placement, 4)


def test_dualpipe_needs_a_split_backward() -> None:
    with pytest.raises(ScheduleError, match=r"dualpipe: stage 0 has no I and W; give the costs weight_us"):
        dualpipe(both_ways(2), 4)
