"""The automatic zero-bubble scheduler: published numbers, memory limits, and never worse than the schedules by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.checking import check
from rota.cluster import Cluster, Link
from rota.costs import Costs
from rota.errors import PlanError, ScheduleError
from rota.placement import Placement
from rota.placing import interleaved, place
from rota.plan import Plan
from rota.schedules.one_f_one_b import one_f_one_b
from rota.schedules.zero_bubble import zb_h1, zb_h2
from rota.schedules.zero_bubble_auto import zb_auto
from rota.simulation import simulate
from rota.tasks import Kind, Op
from support.sampling import some

REFERENCE = json.loads((Path(__file__).parent / "zero_bubble_reference.json").read_text())["rows"]


def row_name(row: dict[str, Any]) -> str:
    return "{ranks}x{microbatches}-{forward_us}-{memory}".format(**row)


def passes(plan: Plan) -> bool:
    try:
        check(plan)
    except PlanError:
        return False
    return True


def pipeline(num_ranks: int, limit_bytes: int | None = None, latency_us: int = 0, **others: Any) -> Placement:
    given = {"forward_us": 10, "backward_us": 11, "weight_us": 7, "activation_bytes": 2, **others}
    return place(Costs.uniform(num_ranks, **given), Cluster.uniform(num_ranks, limit_bytes, latency_us))


# --- published numbers ------------------------------------------------------------------------------------------------

IN_EVERY_RUN = [row for row in REFERENCE if row["ranks"] < 32 or (row["microbatches"], row["memory"]) == (64, 1.5)]


@pytest.mark.parametrize("row", IN_EVERY_RUN, ids=row_name)
def test_no_longer_than_published(row: dict[str, Any]) -> None:
    placement = pipeline(
        row["ranks"],
        int(2 * row["ranks"] * row["memory"]),
        row["transfer_us"],
        forward_us=row["forward_us"],
        backward_us=row["input_us"],
        weight_us=row["weight_us"],
    )
    plan = zb_auto(placement, row["microbatches"])
    check(plan)
    assert simulate(plan).span_us <= row["span_us"]


# --- any costs --------------------------------------------------------------------------------------------------------


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    num_ranks = draw(st.integers(1, 5))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(low, high), min_size=num_ranks, max_size=num_ranks)))

    activation_bytes = each(0, 12)
    buffers = draw(st.sampled_from((0, 0, 1, 3)))
    recompute = draw(st.booleans())
    costs = Costs(
        each(0, 20),
        each(0, 20),
        each(0, 20),
        activation_bytes,
        input_frees_bytes=tuple(draw(st.integers(0, held)) for held in activation_bytes),
        boundary_bytes=buffers,
        forward_peak_bytes=each(0, 3),
        backward_peak_bytes=each(0, 3),
        weight_peak_bytes=each(0, 3),
        static_bytes=each(0, 5),
        recompute_us=tuple(draw(st.sampled_from((None, 0, 7))) for _ in range(num_ranks)) if recompute else None,
        checkpoint_bytes=tuple(draw(st.integers(0, held)) for held in activation_bytes),
    )
    limits = st.one_of(st.none(), st.integers(10, 100))
    limit_bytes = tuple(draw(limits) for _ in range(num_ranks))
    return place(costs, Cluster(limit_bytes, Link(draw(st.integers(0, 15)), draw(st.sampled_from((None, 1))))))


@settings(max_examples=some(80), deadline=None, derandomize=True)
@given(placements(), st.integers(1, 9))
def test_fits_and_is_never_worse_than_by_hand(placement: Placement, num_microbatches: int) -> None:
    by_hand = [schedule(placement, num_microbatches) for schedule in (zb_h1, zb_h2, one_f_one_b)]
    spans = [simulate(plan).span_us for plan in by_hand if passes(plan)]
    try:
        plan = zb_auto(placement, num_microbatches)
    except ScheduleError:
        assert not spans
        assert not passes(one_at_a_time(placement, num_microbatches))
        return
    check(plan)
    assert simulate(plan).span_us <= min(spans, default=simulate(plan).span_us)
    for order in plan.orders:
        for kind in Kind:
            of_kind = [op.microbatch for op in order if op.kind is kind]
            assert of_kind == sorted(of_kind)


def one_at_a_time(placement: Placement, num_microbatches: int) -> Plan:
    kinds = (Kind.F, Kind.R, Kind.I, Kind.W)
    orders = (
        tuple(Op(s, kind, m) for m in range(num_microbatches) for kind in kinds if (s, kind) in placement.index)
        for s in placement.stages
    )
    return Plan(placement, num_microbatches, tuple(orders))


def every_order(stage: int, num_microbatches: int) -> Iterator[tuple[Op, ...]]:
    def further(done: tuple[int, int, int], order: tuple[Op, ...]) -> Iterator[tuple[Op, ...]]:
        if len(order) == 3 * num_microbatches:
            yield order
        for i, kind in enumerate((Kind.F, Kind.I, Kind.W)):
            if done[i] < (done[i - 1] if i else num_microbatches):
                more = (*done[:i], done[i] + 1, *done[i + 1 :])
                yield from further(more, (*order, Op(stage, kind, done[i])))

    yield from further((0, 0, 0), ())


@pytest.mark.parametrize("limit_bytes", [2, 4, 5, None])
@pytest.mark.parametrize("times", [(10, 12, 5, 3), (8, 10, 15, 1)])
def test_the_best_there_is_in_a_tiny_pipeline(times: tuple[int, int, int, int], limit_bytes: int | None) -> None:
    forward, back, weight, latency = times
    placement = pipeline(2, limit_bytes, latency, forward_us=forward, backward_us=back, weight_us=weight)
    spans = []
    for orders in product(every_order(0, 3), every_order(1, 3)):
        plan = Plan(placement, 3, orders)
        if passes(plan):
            spans.append(simulate(plan).span_us)
    assert simulate(zb_auto(placement, 3)).span_us == min(spans)


@pytest.mark.sweep
def test_memory_buys_time_down_to_one_microbatch_and_up_to_no_bubble() -> None:
    spans = [simulate(zb_auto(pipeline(4, limit), 12)).span_us for limit in (2, 4, 6, 8, 10, 12, 16, None)]
    assert spans == sorted(spans, reverse=True)
    assert spans[0] == 12 * (4 * 10 + 4 * 11 + 7)  # one at a time
    assert spans[-1] == 12 * (10 + 11 + 7)


def test_uneven_stages_hide_behind_the_slowest() -> None:
    costs = Costs((10, 13, 9, 12), (10, 13, 9, 12), (10, 13, 9, 12), activation_bytes=2)
    plan = zb_auto(place(costs, Cluster.uniform(4, 16)), 16)
    assert simulate(plan).span_us == 16 * 3 * 13


def test_buffers_count_too() -> None:
    placement = pipeline(4, boundary_bytes=3)
    free = simulate(zb_auto(placement, 8))
    limit = max(free.peak_memory_bytes) - 4
    plan = zb_auto(replace(placement, cluster=Cluster.uniform(4, limit)), 8)
    check(plan)
    assert free.span_us < simulate(plan).span_us < 8 * 4 * 21


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_refuses_what_it_cannot_schedule() -> None:
    whole = place(Costs.uniform(2), Cluster.uniform(2))
    with pytest.raises(ScheduleError, match=r"zb_auto: stage 0 has no I and W; give the costs weight_us"):
        zb_auto(whole, 4)
    with pytest.raises(ScheduleError, match=r"zb_auto: needs a chain of stages; place it by rota.place"):
        zb_auto(interleaved(Costs.uniform(4, weight_us=1), Cluster.uniform(2)), 4)


def test_tells_what_the_least_memory_is() -> None:
    costs = Costs.uniform(2, weight_us=1, activation_bytes=4, static_bytes=(3, 5))
    told = (
        r"rank 1 holds 9 B \(9 bytes\) even with one micro-batch at a time, 5 B of it always .*, over its limit of 8 B"
    )
    with pytest.raises(ScheduleError, match=told):
        zb_auto(place(costs, Cluster.uniform(2, 8)), 4)
    check(zb_auto(place(costs, Cluster.uniform(2, 9)), 4))
