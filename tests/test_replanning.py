"""The same stages on another number of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota import (
    Cluster,
    Costs,
    Kind,
    PlacementError,
    Plan,
    PlanError,
    bidirectional,
    check,
    interleaved,
    place,
    simulate,
)
from rota.cluster import Link, SharedLink
from rota.replanning import replan
from rota.schedules import NAMED, forward_only, gpipe, one_f_one_b
from rota.schedules.ready_first import ready_first
from support.sampling import some


def chain(num_ranks: int, num_microbatches: int = 8, **costs: int) -> Plan:
    return one_f_one_b(place(Costs.uniform(num_ranks, 100, 200, **costs), Cluster.uniform(num_ranks)), num_microbatches)


def stages_by_rank(plan: Plan) -> list[tuple[int, ...]]:
    return [plan.placement.stages_on(rank) for rank in range(plan.num_ranks)]


def test_neighbours_share_a_rank_by_time() -> None:
    costs = Costs((10, 10, 10, 70, 10), (20, 20, 20, 140, 20))
    plan = one_f_one_b(place(costs, Cluster.uniform(5)), 6)
    assert stages_by_rank(replan(plan, 2)) == [(0, 1, 2), (3, 4)]
    assert stages_by_rank(replan(plan, 3)) == [(0, 1, 2), (3,), (4,)]
    assert stages_by_rank(replan(plan, 1)) == [(0, 1, 2, 3, 4)]


def test_as_many_ranks_change_nothing() -> None:
    plan = chain(4)
    assert replan(plan, 4) is plan


def test_more_ranks_than_before() -> None:
    plan = NAMED["interleaved_1f1b"](interleaved(Costs.uniform(8, 100, 200), Cluster.uniform(2)), 8)
    assert stages_by_rank(replan(plan, 8)) == [(stage,) for stage in range(8)]
    assert simulate(replan(plan, 8)).makespan_us == simulate(chain(8)).makespan_us


def test_what_ranks_share_is_shared_by_those_that_are_left() -> None:
    host, card = SharedLink("host", 4, (0, 1, 2, 3), (0, 1, 2, 3)), SharedLink("card", 4, (2, 3), (0, 1))
    cluster = Cluster((None,) * 4, Link(1, 2), shared=(host, card))
    plan = gpipe(place(Costs.uniform(4, 100, 200, boundary_bytes=8), cluster), 4)
    nodes = dict(plan.services.transfers())
    plan = replace(plan, service_orders=tuple(tuple(nodes[node] for node in order) for order in plan.served))
    fewer = replan(plan, 2)
    left = replace(host, senders=(0, 1), receivers=(0, 1))
    assert fewer.placement.cluster == Cluster((None,) * 2, Link(1, 2), shared=(left,))
    assert fewer.service_orders == ()
    check(fewer)


def test_two_streams_go_in_opposite_directions() -> None:
    plan = NAMED["dualpipe"](bidirectional(Costs.uniform(4, 100, 100, 100), Cluster.uniform(4)), 8)
    found = replan(plan, 2)
    assert stages_by_rank(found) == [(0, 1, 6, 7), (2, 3, 4, 5)]
    check(found)


def test_inference() -> None:
    plan = forward_only(place(Costs.uniform(4), Cluster.uniform(4)).forward_only(), 6)
    found = replan(plan, 2)
    check(found)
    assert {op.kind for order in found.orders for op in order} == {Kind.F}


def test_memory_decides_where_the_times_would_not_fit() -> None:
    """By time stages 0 to 2 share a rank, with three big weights; by weights, stages 0 and 1."""
    costs = Costs((10, 10, 10, 30), (20, 20, 20, 60), static_bytes=(100, 100, 100, 0), activation_bytes=1)
    cluster = Cluster.uniform(4, limit_bytes=250)
    plan = one_f_one_b(place(costs, cluster), 4)
    assert stages_by_rank(replan(plan, 2)) == [(0, 1), (2, 3)]
    assert replan(plan, 2).placement.static_bytes == (200, 100)


def test_fewer_forwards_ahead_where_memory_is_short() -> None:
    plan = one_f_one_b(place(Costs.uniform(4, 100, 200, activation_bytes=100), Cluster.uniform(4, 450)), 8)
    found = replan(plan, 2)
    check(found)
    assert max(simulate(found).peak_memory_bytes) <= 450


def test_what_does_not_fit_is_refused() -> None:
    cluster = Cluster.uniform(4, limit_bytes=150)
    plan = one_f_one_b(place(Costs.uniform(4, static_bytes=100), cluster), 4)
    with pytest.raises(PlanError, match=r"4 stages do not fit on 2 ranks: rank 0 holds 200 B .* or start more ranks"):
        replan(plan, 2)


def test_the_least_limit_holds_for_all() -> None:
    placement = place(Costs.uniform(3), Cluster((10, None, 7)))
    assert replan(gpipe(placement, 2), 2).placement.cluster.limit_bytes == (7, 7)


def test_what_cannot_be_moved_is_told() -> None:
    with pytest.raises(PlacementError, match=r"4 stages cannot be placed on 6 ranks; start at most 4 ranks"):
        replan(chain(4), 6)
    with pytest.raises(PlacementError, match=r"num_ranks is 0"):
        replan(chain(4), 0)
    together = gpipe(place(Costs.uniform(2), Cluster.uniform(3), [(0, 1), 2]), 2)
    with pytest.raises(PlacementError, match=r"stage 0 is on the ranks 0, 1 together"):
        replan(together, 2)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    num_stages = draw(st.integers(2, 6))
    number = st.integers(0, 50)
    times = [draw(st.lists(number, min_size=num_stages, max_size=num_stages)) for _ in range(3)]
    split = draw(st.booleans())
    edges = [(stage, stage + 1) for stage in range(num_stages - 1)]
    edges += draw(st.lists(st.sampled_from([(a, b) for b in range(num_stages) for a in range(b)]), max_size=2))
    costs = Costs(
        tuple(times[0]),
        tuple(times[1]),
        tuple(times[2]) if split else None,
        activation_bytes=draw(number),
        boundary_bytes=draw(number),
        recompute_us=tuple(times[2]) if draw(st.booleans()) else None,
        edges=tuple(dict.fromkeys(edges)),
    )
    cluster = Cluster.uniform(num_stages, None, draw(number))
    return gpipe(place(costs, cluster), draw(st.integers(1, 6)))


@settings(max_examples=some(150), deadline=None)
@given(plans(), st.data())
def test_any_plan_on_any_number_of_ranks(plan: Plan, data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, plan.num_stages))
    found = replan(plan, num_ranks)
    check(found)
    assert found.num_ranks == num_ranks
    assert found == replan(plan, num_ranks)
    own = [replace(task, ranks=(0,)) for task in plan.placement.tasks]
    assert [replace(task, ranks=(0,)) for task in found.placement.tasks] == own
    assert found.placement.edges == plan.placement.edges
    if num_ranks < plan.num_ranks:
        ranks = [found.placement.ranks_of(stage)[0] for stage in found.placement.stages]
        assert ranks == sorted(ranks)
        assert set(ranks) == {*range(num_ranks)}
        assert simulate(found).makespan_us <= simulate(gpipe(found.placement, plan.num_microbatches)).makespan_us


@settings(max_examples=some(100), deadline=None)
@given(plans(), st.integers(0, 3), st.data())
def test_ready_first_makes_a_plan_for_any_placement(plan: Plan, forwards_a_hop: int, data: st.DataObject) -> None:
    stages = plan.num_stages
    ranks = data.draw(st.lists(st.integers(0, 2), min_size=stages, max_size=stages))
    tasks = tuple(replace(task, ranks=(ranks[task.stage],)) for task in plan.placement.tasks)
    placement = replace(plan.placement, tasks=tasks, cluster=Cluster.uniform(3), static_bytes=())
    made = ready_first(placement, plan.num_microbatches, forwards_a_hop)
    check(made)
    for order in made.orders:
        for stage in placement.stages:
            held = most = 0
            last = Kind.W if placement.task(stage, Kind.W) else Kind.B
            for op in order:
                held += (op.stage == stage) * ((op.kind is Kind.F) - (op.kind is last))
                most = max(most, held)
            assert most <= 1 + forwards_a_hop * (stages - 1)


def test_ready_first_is_1f1b_on_one_stage_a_rank() -> None:
    for latency_us in (0, 10):
        placement = place(Costs.uniform(4, 100, 200), Cluster.uniform(4, None, latency_us))
        assert ready_first(placement, 8) == one_f_one_b(placement, 8)
        eager = NAMED["eager_1f1b"](placement, 8)
        assert simulate(ready_first(placement, 8, 2)).makespan_us == simulate(eager).makespan_us
