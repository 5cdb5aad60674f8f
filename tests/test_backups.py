"""Backup plans: complete, on ranks that have the weights, and as fast as arithmetic says they can be."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota import (
    Cluster,
    Costs,
    FormatError,
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
from rota.backups import Backup, Backups, Place, backup_placement, backup_placements, plan_backup, survivors
from rota.cluster import Link, SharedLink
from rota.errors import RotaError
from rota.schedules import NAMED, forward_only, one_f_one_b
from rota.schedules.ready_first import ready_first
from rota.search.backups import find_backups
from rota.search.bounds import bounds_of
from support.sampling import some


def chain(num_ranks: int, num_microbatches: int, limit_bytes: int | None = None, **costs: int) -> Plan:
    cluster = Cluster.uniform(num_ranks, limit_bytes)
    return one_f_one_b(place(Costs.uniform(num_ranks, 100, 200, **costs), cluster), num_microbatches)


def backups_of(plan: Plan, num_replicas: int) -> Backups:
    found = []
    for rank in range(plan.num_ranks):
        backup = plan_backup(plan, num_replicas, [Place(0, rank)])
        makespan_us = simulate(backup).makespan_us
        found.append(Backup(rank, backup, makespan_us, makespan_us))
    return Backups(plan, num_replicas, tuple(found))


# --- what is done, and where ------------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, int, list[Place]]:
    num_ranks, num_replicas = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    shape = draw(st.sampled_from(["chain", "split", "interleaved", "bidirectional"]))
    link = Link(draw(st.integers(0, 30)), draw(st.sampled_from([None, 7])), send_us=draw(st.integers(0, 5)))
    shared = [SharedLink("host", 5, (*range(num_ranks),), (*range(num_ranks),))] if draw(st.booleans()) else []
    links = [(0, 1, Link(50))] if num_ranks > 1 and draw(st.booleans()) else []
    cluster = Cluster((None,) * num_ranks, link, tuple(links), tuple(shared), draw(st.integers(0, 3)))
    num_stages = num_ranks * (2 if shape == "interleaved" else 1)
    times = draw(st.lists(st.integers(1, 50), min_size=num_stages, max_size=num_stages))
    costs = Costs(
        tuple(times),
        tuple(2 * us for us in times),
        weight_us=tuple(times) if shape == "split" else None,
        activation_bytes=(10,) * num_stages,
        boundary_bytes=20,
        reduce_us=(5,) * num_stages,
        optimizer_us=(3,) * num_stages,
    )
    placed = {"interleaved": interleaved, "bidirectional": bidirectional}.get(shape, place)(costs, cluster)
    num_microbatches = 2 * draw(st.integers(1, 4))
    lost = draw(st.lists(st.integers(0, num_ranks - 1), min_size=1, max_size=num_ranks, unique=True))
    places = [Place(draw(st.integers(0, num_replicas - 1)), rank) for rank in lost]
    return ready_first(placed, num_microbatches), num_replicas, places


@settings(max_examples=some(15))
@given(cases())
def test_every_task_of_every_replica_is_done_once_where_its_weights_are(case: tuple[Plan, int, list[Place]]) -> None:
    plan, num_replicas, lost = case
    backup = plan_backup(plan, num_replicas, lost)
    check(backup)
    left = survivors(plan.num_ranks, num_replicas, lost)
    assert backup.num_ranks == len(left) == num_replicas * plan.num_ranks - len(lost)
    done: set[tuple[int, int, Kind, int]] = set()
    num_stages = plan.placement.num_stages // plan.placement.num_components
    for place_, order in zip(left, backup.orders, strict=True):
        for op in order:
            replica, microbatch = backup.origin(op.microbatch)
            stage = op.stage % plan.placement.num_stages
            assert stage in plan.placement.stages_on(place_.rank)
            assert op.stage // num_stages % backup.placement.num_components == (
                op.microbatch % backup.placement.num_components
            )
            kind = Kind.B if op.kind is Kind.I and plan.placement.task(stage, Kind.B) else op.kind
            done.add((replica, stage, kind, microbatch))
    base = {(op.stage, op.kind, op.microbatch) for order in plan.orders for op in order}
    expected = {(replica, *op) for replica in range(num_replicas) for op in base}
    split = {op for op in done if op not in expected}
    assert expected <= done
    assert all(kind is Kind.W for _, _, kind, _ in split)
    assert Plan.from_json(backup.to_json()) == backup
    num = len(left)
    assert sum(map(len, backup.orders)) == backup.num_ops
    lowest_us = min(bounds_of(p, backup.num_microbatches)[0].us for p in backup_placements(plan, num_replicas, lost))
    assert lowest_us <= simulate(backup).makespan_us
    assert {route.receiver for route in backup.placement.routes} <= {*range(num)}


def test_microbatches_of_a_lost_rank_are_shared_out_among_all_its_peers() -> None:
    plan = chain(4, 6)
    backup = plan_backup(plan, 4, [Place(2, 1)])
    left = survivors(4, 4, [Place(2, 1)])
    assert left[:3] == [Place(2, 0), Place(2, 2), Place(2, 3)]  # the replica that lost a rank comes first
    forwards = [sum(op.kind is Kind.F for op in order) for order in backup.orders]
    assert [count for place_, count in zip(left, forwards, strict=True) if place_.rank == 1] == [8, 8, 8]
    assert {count for place_, count in zip(left, forwards, strict=True) if place_.rank != 1} == {6}


def test_each_rank_reduces_and_optimizes_a_stage_once() -> None:
    plan = chain(3, 4, reduce_us=7, optimizer_us=5)
    backup = plan_backup(plan, 2, [Place(0, 1)])
    ends = [(end.stage % 3, rank) for i, rank in backup.step_end_ranks for end in [backup.placement.step_ends[i]]]
    assert sorted(ends) == [(0, 0), (0, 2), (1, 3), (2, 1), (2, 4)]


# --- how fast ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_replicas", "num_microbatches"), [(2, 8), (3, 6), (4, 9)])
def test_a_peers_bubbles_take_what_recycle_says(num_replicas: int, num_microbatches: int) -> None:
    """Its peers have n · R / (R - 1) micro-batches of F, I and W, after r forwards and before r I: nothing less."""
    plan = chain(4, num_microbatches)
    load_us = num_microbatches * num_replicas // (num_replicas - 1) * 300
    for backup in backups_of(plan, num_replicas).backups[:3]:
        expected_us = max(load_us + 100 * backup.lost, simulate(plan).makespan_us)
        assert backup.makespan_us == expected_us


def test_with_three_replicas_of_recycles_example_the_first_rank_costs_nothing() -> None:
    """4 ranks, 6 micro-batches, backwards of twice a forward: 27 forwards long, as without a loss."""
    found = find_backups(chain(4, 6), 3, time_limit_s=0.4, deterministic=True)
    assert simulate(found.plan).makespan_us == found.backups[0].makespan_us == 2700
    for backup in found.backups:
        assert (
            backup.bound_us
            <= backup.makespan_us
            <= simulate(plan_backup(found.plan, 3, [Place(0, backup.lost)])).makespan_us
        )
        assert backup.makespan_us <= 3100  # whole backwards would take at least 3300
    lines = found.to_text().splitlines()
    assert lines[0].startswith("3 replicas of 4 ranks, 6 micro-batches each: a step takes 2.7 ms")
    assert lines[2].split() == ["0", "2.7", "ms", "+0.0%", "2.7", "ms", "(0.0%)", *lines[2].split()[7:9], "split"]


def test_memory_limits_hold_on_the_peers() -> None:
    generous = plan_backup(chain(2, 4, activation_bytes=10), 2, [Place(0, 0)])
    most = max(simulate(generous).peak_memory_bytes)
    tight = plan_backup(chain(2, 4, limit_bytes=most - 10, activation_bytes=10), 2, [Place(0, 0)])
    assert max(simulate(tight).peak_memory_bytes) <= most - 10
    plan = chain(2, 4, activation_bytes=10)
    small = replace(plan, placement=replace(plan.placement, cluster=Cluster.uniform(2, 9)))
    with pytest.raises(PlanError, match=r"without rank 0 of replica 0 the step does not fit in memory: rank \d would"):
        plan_backup(small, 2, [Place(0, 0)])


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_what_nobody_can_stand_in_for_is_refused() -> None:
    plan = chain(2, 4)
    with pytest.raises(PlacementError, match="rank 1 is lost in every replica, so nobody has the weights of stage 1"):
        plan_backup(plan, 2, [Place(0, 1), Place(1, 1)])
    with pytest.raises(PlacementError, match="num_replicas is 1: a backup plan needs 2 replicas"):
        plan_backup(plan, 1, [Place(0, 1)])
    with pytest.raises(PlacementError, match="rank 2 of replica 0 is lost, but there are 2 replicas of 2 ranks"):
        plan_backup(plan, 2, [Place(0, 2)])
    with pytest.raises(PlacementError, match="forwards only"):
        plan_backup(forward_only(plan.placement.forward_only(), 4), 2, [Place(0, 1)])
    both = ready_first(place(Costs.uniform(2, 1, 2), Cluster.uniform(2), [(0, 1), (0, 1)]), 4)
    with pytest.raises(PlacementError, match="stage 0 is on the ranks 0, 1 together"):
        plan_backup(both, 2, [Place(0, 1)])
    uneven = ready_first(bidirectional(Costs.uniform(2, 1, 2), Cluster.uniform(2)), 5)
    with pytest.raises(PlacementError, match="5 micro-batches for 2 data streams"):
        backup_placement(uneven, 2, [Place(0, 1)])


def test_a_file_holds_what_was_written_and_nothing_else() -> None:
    plan = NAMED["zb_h1"](place(Costs.uniform(2, 1, 1, weight_us=1), Cluster.uniform(2)), 4)
    backups = backups_of(plan, 2)
    text = backups.to_json()
    assert Backups.from_json(text, plan) == backups

    def changed(**fields: object) -> str:
        return json.dumps({**json.loads(text), **fields})

    entries = json.loads(text)["backups"]
    other = one_f_one_b(place(Costs.uniform(2, 1, 2), Cluster.uniform(2)), 4)
    swapped = [{**entries[0], "plan": entries[1]["plan"]}, entries[1]]
    unordered = json.loads(json.dumps(entries))
    unordered[0]["plan"]["orders"][0] = " ".join(reversed(unordered[0]["plan"]["orders"][0].split()))
    for wrong, error in (
        (changed(rota="plan"), "not a backups file: it says"),
        (changed(more=1), "has the field"),
        (changed(num_replicas=1), "backups.num_replicas is 1; expected 2 or more"),
        (changed(num_replicas=10**9), "expected 1024 or less"),
        (changed(num_replicas=3), "is not one for 3 replicas"),
        (changed(backups=entries[:1]), "has 1 entries for 2 ranks"),
        (changed(backups=entries[::-1]), r"backups\[0\].lost is 1; expected 0"),
        (changed(backups=swapped), "the backup plan for rank 0 is not one for 2 replicas"),
        (changed(backups=unordered), "cycle"),
        (changed(backups=[{**entries[0], "bound_us": 10**9}, entries[1]]), r"backups\[0\].bound_us is 1000000000"),
    ):
        with pytest.raises(RotaError, match=error):
            Backups.from_json(wrong, plan)
    with pytest.raises(FormatError, match="as the backups of this plan have; plan them again"):
        Backups.from_json(text, other)


def test_streams_that_are_no_replicas_are_refused_in_a_plan() -> None:
    document = json.loads(plan_backup(chain(2, 4), 2, [Place(0, 1)]).to_json())
    assert document["merged_replicas"] == 2
    with pytest.raises(FormatError, match="merged_replicas is 3; expected a divisor of the 2 data streams"):
        Plan.from_json(json.dumps({**document, "merged_replicas": 3}))
