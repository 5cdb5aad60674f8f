"""A rank's program: the plan's order, how often each value is used, and receives that are posted ahead."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.placing import place
from rota.core.plan import Plan
from rota.core.programs.actions import NUM_OPS_AHEAD, Action, compile_program, prefetch_receives
from rota.core.simulation import simulate
from rota.core.tasks import Edge, Kind, Op
from rota.schedules import gpipe, one_f_one_b
from support.random_plans import random_plan, with_random_wires

Programs = list[tuple[list[Action], list[Action]]]  # for each rank: strict, early


def programs(plan: Plan, edges: list[tuple[int, int]]) -> Programs:
    index = {edge: i for i, edge in enumerate(edges)}
    strict = [compile_program(plan, index, rank).actions for rank in range(plan.num_ranks)]
    return [(actions, prefetch_receives(plan, rank, actions)) for rank, actions in enumerate(strict)]


def many_programs() -> Iterator[tuple[Plan, Programs]]:
    for seed in range(60):
        for num_ranks in (2, 4):
            edges, plan = random_plan(seed, num_ranks)
            yield plan, programs(plan, [*edges])
            wired = with_random_wires(plan, seed)
            yield wired, programs(wired, [*edges])


def test_actions_keep_the_wire_order() -> None:
    for plan, of_ranks in many_programs():
        for rank, (strict, _) in enumerate(of_ranks):
            here = [
                action
                for action in plan.wire_order
                if (isinstance(action, Op) and action in plan.orders[rank])
                or (not isinstance(action, Op) and rank in (action.sender, action.receiver))
            ]
            assert [action.message.transfer if action.message else action.op for action in strict] == here


def test_what_is_used_how_often() -> None:
    placement = place(Costs.uniform(3), Cluster.uniform(3), [(0, 1), 0, (0, 1, 2)], [(0, 1), (0, 2), (1, 2)])
    plan, index = gpipe(placement, 1), {(0, 1): 0, (0, 2): 1, (1, 2): 2}
    uses = [compile_program(plan, index, rank).num_uses for rank in range(3)]
    # Values of edge 0 stay on rank 0; of edges 1 and 2 rank 0 reads one and sends two. Gradients are read on rank 0
    # and sent to rank 1 where it does stage 0 too; what rank 1 and rank 2 make besides is nobody's.
    assert uses[0] == {(0, False): 1, (1, False): 3, (2, False): 3, (0, True): 2, (1, True): 2, (2, True): 1}
    assert {key: n for key, n in uses[1].items() if n} == {}
    assert {key: n for key, n in uses[2].items() if n} == {}


def test_who_must_note_layouts_itself() -> None:
    plan = gpipe(place(Costs.uniform(2), Cluster.uniform(3), [(0, 1), 2]), 1)
    assert [compile_program(plan, {(0, 1): 0}, rank).unsent for rank in range(3)] == [set(), {0}, set()]


def ops_ahead(actions: list[Action]) -> list[int]:
    """For each receive how many ops run between it and its reader."""
    ops = [action.op for action in actions if action.what == "run"]
    ahead, num_ops = [], 0
    for action in actions:
        num_ops += action.what == "run"
        if action.what == "receive":
            ahead.append(ops.index(action.op) - num_ops)
    return ahead


def test_nothing_else_moves() -> None:
    for plan, of_ranks in many_programs():
        for rank, (strict, early) in enumerate(of_ranks):
            assert Counter(map(repr, early)) == Counter(map(repr, strict))
            assert [a for a in early if a.what != "receive"] == [a for a in strict if a.what != "receive"]
            assert tuple(a.op for a in early if a.what == "run") == plan.orders[rank]


def test_receives_are_posted_before_their_readers_and_never_later_than_planned() -> None:
    for _, of_ranks in many_programs():
        for strict, early in of_ranks:
            planned = dict(zip((a.message for a in strict if a.what == "receive"), ops_ahead(strict), strict=True))
            posted = dict(zip((a.message for a in early if a.what == "receive"), ops_ahead(early), strict=True))
            for message, ahead in posted.items():
                assert max(planned[message], 0) <= ahead <= max(planned[message], NUM_OPS_AHEAD)


def test_without_a_limit_they_are_as_early_as_their_sender_allows() -> None:
    """In 1F1B every rank but the ends reads from both sides in turn: each receive is two ops ahead."""
    plan = one_f_one_b(place(Costs.uniform(4, 5, 10), Cluster.uniform(4)), 16)
    for rank, (_, early) in enumerate(programs(plan, [(0, 1), (1, 2), (2, 3)])):
        ahead = ops_ahead(early)
        num_first = sum(op.kind == "F" for op in plan.orders[rank][:NUM_OPS_AHEAD])
        assert all(a >= NUM_OPS_AHEAD for a in ahead[num_first:]), (rank, ahead)


def test_both_sides_of_a_pair_agree_on_the_order_of_messages() -> None:
    for _, of_ranks in many_programs():
        for a, (_, sender) in enumerate(of_ranks):
            for b, (_, receiver) in enumerate(of_ranks):
                sent = [x.message.transfer for x in sender if x.what == "send" and x.message]
                received = [x.message.transfer for x in receiver if x.what == "receive" and x.message]
                assert [t for t in sent if t.receiver == b] == [t for t in received if t.sender == a]


def bytes_held(plan: Plan, rank: int, strict: list[Action], early: list[Action]) -> int:
    """The most that the rank holds, with the plan's levels between ops and the buffers posted early on top."""
    level, num_events = plan.placement.static_bytes[rank], 0
    most = [0] * len(plan.orders[rank])
    for key, change in simulate(plan).memory_events(rank):
        level += change
        num_events += key % 4 in (1, 3)
        op = max(num_events - 1, 0) // 2
        most[op] = max(most[op], level)
    extra = [0] * len(most)
    num_before = {action: i for i, action in enumerate(early)}
    for i, action in enumerate(strict):
        if action.what == "receive" and action.message:
            planned = sum(a.what == "run" for a in strict[:i])
            posted = sum(a.what == "run" for a in early[: num_before[action]])
            for op in range(posted, planned):
                extra[op] += action.message.transfer.num_bytes
    return max((a + b for a, b in zip(most, extra, strict=True)), default=level)


def with_bytes(plan: Plan, seed: int) -> Plan:
    """Each edge carries 1 to 50 bytes; forwards keep 30, which backwards free."""
    rng = random.Random(seed)
    kept = {Kind.F: 30, Kind.B: -30, Kind.W: -30}
    tasks = tuple(replace(task, held_bytes=kept.get(task.kind, 0)) for task in plan.placement.tasks)
    edges = tuple(Edge(a, b, rng.randint(1, 50)) for a, b, _ in plan.placement.edges)
    return replace(plan, placement=replace(plan.placement, tasks=tasks, edges=edges))


@given(st.integers(0, 10**6), st.sampled_from([2, 4]), st.sampled_from([0, 20, 100]))
def test_buffers_posted_early_stay_within_the_limit(seed: int, num_ranks: int, spare: int) -> None:
    edges, plan = random_plan(seed, num_ranks)
    plan = with_bytes(plan, seed)
    needed = simulate(plan).peak_memory_bytes
    cluster = replace(plan.placement.cluster, limit_bytes=tuple(b + spare for b in needed))
    tight = replace(plan, placement=replace(plan.placement, cluster=cluster))
    for rank, (strict, early) in enumerate(programs(tight, [*edges])):
        assert bytes_held(tight, rank, strict, early) <= needed[rank] + spare


@pytest.mark.parametrize(("num_buffers", "ahead"), [(0, 0), (1, 1), (2, 2), (100, 2)])
def test_room_for_so_many_buffers_posts_so_far_ahead(num_buffers: int, ahead: int) -> None:
    """Rank 1 in its forwards: each takes in 100 bytes and keeps nothing."""
    costs = Costs.uniform(2, 10, 20, boundary_bytes=100)
    plan = gpipe(place(costs, Cluster.uniform(2)).forward_only(), 8)
    needed = simulate(plan).peak_memory_bytes
    limits = tuple(b + 100 * num_buffers for b in needed)
    limited = place(costs, replace(Cluster.uniform(2), limit_bytes=limits)).forward_only()
    _, (_, early) = programs(gpipe(limited, 8), [(0, 1)])
    assert ops_ahead(early)[3:] == [ahead] * 5
