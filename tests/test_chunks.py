"""Chunks of samples: which orders are refused, and Seq1F1B at every size."""

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from rota import Cluster, Costs, Kind, Placement, Plan, check, find_plan, schedules, simulate
from rota.core.errors import PlacementError, PlanError, RotaError, ScheduleError
from rota.core.placing import bidirectional, interleaved, place
from support.core_strategies import deal, differing_plans
from support.sampling import some


def chain(num_ranks: int, sample_of: tuple[int, ...], weight_us: int | None = None) -> Placement:
    costs = Costs.uniform(num_ranks, 10, 20, weight_us, activation_bytes=1)
    return replace(place(costs, Cluster.uniform(num_ranks)), sample_of=sample_of)


def violates(plan: Plan) -> bool:
    """Whether a rank runs two chunks of a sample in the wrong order, from the words of docs/variable-batches.md."""
    samples = plan.placement.sample_of
    return any(
        a.stage == b.stage
        and a.kind == b.kind
        and samples[a.microbatch] == samples[b.microbatch]
        and (a.microbatch > b.microbatch if a.kind is Kind.F else a.microbatch < b.microbatch)
        for order in plan.orders
        for i, a in enumerate(order)
        for b in order[i + 1 :]
        if a.kind in (Kind.F, Kind.B, Kind.I)
    )


@given(differing_plans(), st.randoms(use_true_random=False))
@settings(max_examples=some(30), suppress_health_check=[HealthCheck.filter_too_much])
def test_check_refuses_exactly_the_wrong_orders(plan: Plan, chooser: random.Random) -> None:
    assume(plan.placement.sample_of)
    check(plan)
    assert not violates(plan)
    ops = [op for order in plan.orders for op in order]
    chooser.shuffle(ops)
    other = deal(plan.placement, plan.num_microbatches, dict.fromkeys(ops))
    reason = ""
    try:
        simulate(other)
    except PlanError as error:
        reason = error.reason
    assert (reason == "chunks") == violates(other)
    assert reason in ("", "cycle", "chunks")


@pytest.mark.parametrize("weight_us", [None, 10])
def test_seq1f1b_at_every_size(weight_us: int | None) -> None:
    """Also with samples of different numbers of chunks. It holds what Seq1F1B does: chunks and later stages."""
    for num_ranks in (1, 2, 3, 4, 8):
        for lengths in [(1, 2), (2,) * 5, (3, 1, 1, 4), (4,) * 4, (1, 1, 5, 2, 2)]:
            samples = tuple(s for s, length in enumerate(lengths) for _ in range(length))
            plan = schedules.seq1f1b(chain(num_ranks, samples, weight_us), len(samples))
            check(plan)
            assert not violates(plan)
            held = simulate(plan).peak_memory_bytes
            if len({*lengths}) == 1 and weight_us is None:
                most = [num_ranks - rank + lengths[0] - 1 for rank in range(num_ranks)]
                assert held == tuple(min(count, len(samples)) for count in most)


def test_the_search_beats_seq1f1b_within_the_constraint() -> None:
    costs = [Costs.uniform(3, 10 + 4 * c, 20 + 8 * c, activation_bytes=1) for c in range(2)]
    placement = Placement.of_classes([place(own, Cluster.uniform(3, 5)) for own in costs], (0, 1, 0, 1), (0, 0, 1, 1))
    result = find_plan(placement, 4, time_limit_s=3, deterministic=True)
    check(result.plan)
    assert not violates(result.plan)
    assert result.plan.placement == placement
    named = {schedule.name for schedule in result.named}
    assert "seq1f1b" in named
    assert "1f1b" not in named
    assert result.makespan_us <= simulate(schedules.seq1f1b(placement, 4)).makespan_us
    assert result.is_optimal


def test_data_streams_have_chunks_of_their_own() -> None:
    both = bidirectional(Costs.uniform(2, 10, 20), Cluster.uniform(2))
    assert both.in_chunks(2, 8).sample_of == (0, 1, 0, 1, 2, 3, 2, 3)
    check(schedules.gpipe(both.in_chunks(2, 8), 8))
    with pytest.raises(PlacementError, match="different data streams"):
        replace(both, sample_of=(0, 0, 1, 1))
    with pytest.raises(PlacementError, match="not a whole number of samples of 2 chunks in each of 2 data streams"):
        both.in_chunks(2, 6)


def test_gpipe_and_several_stages_per_rank() -> None:
    placement = interleaved(Costs.uniform(4, 10, 20), Cluster.uniform(2)).in_chunks(3, 6)
    check(schedules.gpipe(placement, 6))
    with pytest.raises(ScheduleError, match="takes one stage per rank"):
        schedules.seq1f1b(placement, 6)


def test_refused() -> None:
    placement = chain(2, (0, 0, 1, 1))
    for wrong, message in [
        (lambda: schedules.seq1f1b(chain(2, ()), 4), "no sample is cut into chunks"),
        (lambda: simulate(schedules.one_f_one_b(placement, 4)), "rank 0 does 0B0 before 0B1, a later chunk"),
        (lambda: check(schedules.seq1f1b(placement, 2)), "has the sizes of 4 micro-batches"),
        (lambda: placement.require_alike("this"), "this does not support chunks of samples"),
        (lambda: Placement.of_classes([placement], (0, 0)), "has classes or chunks"),
        (
            lambda: Placement.of_classes(
                [place(Costs.uniform(2, us), Cluster.uniform(2)) for us in (1, 2)], (0, 1), (0, 0, 0)
            ),
            "sample_of has 3 entries and class_of 2",
        ),
    ]:
        with pytest.raises(RotaError, match=message):
            wrong()
    assert chain(2, (0, 1, 2)).is_alike  # a chunk each
