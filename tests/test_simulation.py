"""The simulated times are the earliest that the definition allows, and no earlier."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from rota import schedules
from rota.cluster import Cluster, Link, SharedLink
from rota.costs import Costs
from rota.errors import PlanError
from rota.placement import Edge, Placement, StepEnd
from rota.placing import place
from rota.plan import Plan
from rota.simulation import simulate
from rota.tasks import Kind, Op, Task, Transfer
from rota.timeline import Timeline
from support import recount as counting
from support.core_strategies import deal, plans, read_by, wired_plans
from support.sampling import some

F, B = Kind.F, Kind.B


def times(timeline: Timeline) -> dict[tuple[int, Op], tuple[int, int]]:
    """(rank, op) -> (start, end), read from the columns."""
    return {
        (rank, op): (timeline.starts_us[rank][i], timeline.ends_us[rank][i])
        for rank, order in enumerate(timeline.plan.orders)
        for i, op in enumerate(order)
    }


def travel_us(cluster: Cluster, sender: int, receiver: int, num_bytes: int) -> int:
    """latency + ceil(bytes / rate) on the pair's own link, else on the common one; nothing on one rank."""
    if sender == receiver:
        return 0
    own = [link for a, b, link in cluster.links if (a, b) == (sender, receiver)]
    link = (own or [cluster.link])[0]
    whole, part = divmod(num_bytes, link.bytes_per_us) if link.bytes_per_us else (0, 0)
    return link.latency_us + whole + (part > 0)


def feeds(placement: Placement, target: Task) -> list[tuple[Task, int, int, int]]:
    """(source, sender, receiver, bytes) of all that `target` reads: rank by rank, or from the first rank to all."""
    found = []
    for edge in placement.edges:
        if placement.tasks[edge.target] == target:
            source = placement.tasks[edge.source]
            for i, receiver in enumerate(target.ranks):
                sender = source.ranks[i if len(source.ranks) == len(target.ranks) else 0]
                found.append((source, sender, receiver, edge.num_bytes))
    return found


def step_end_times(timeline: Timeline) -> list[tuple[int, int, int, int]]:
    """When reductions and optimizer steps happen, told from the ops' times alone."""
    plan, at = timeline.plan, times(timeline)
    reductions, reduced = [], [0] * plan.num_ranks
    for i, rank in plan.step_end_ranks:
        end = plan.placement.step_ends[i]
        gradients = [op for op in plan.orders[rank] if op.stage == end.stage and op.kind in (Kind.B, Kind.W)]
        start = max([reduced[rank], *(at[rank, op][1] for op in gradients)])
        reduced[rank] = start + end.reduce_us
        reductions.append((start, reduced[rank]))
    optimized = [max(us, *(at[r, op][1] for op in plan.orders[r]), 0) for r, us in enumerate(reduced)]
    expected = []
    for (i, rank), times_us in zip(plan.step_end_ranks, reductions, strict=True):
        start = optimized[rank]
        optimized[rank] += plan.placement.step_ends[i].optimizer_us
        expected.append((*times_us, start, optimized[rank]))
    return expected


@given(plans())
@settings(max_examples=some(200))
def test_everything_starts_as_soon_as_inputs_and_ranks_allow(plan: Plan) -> None:
    placement, timeline = plan.placement, simulate(plan)
    at, cluster = times(timeline), placement.cluster
    for rank, order in enumerate(plan.orders):
        for i, op in enumerate(order):
            start, end = at[rank, op]
            task = placement.task(op.stage, op.kind)
            assert end - start == task.duration_us
            assert all(at[other, op] == (start, end) for other in task.ranks)
            arrivals = [
                at[sender, Op(source.stage, source.kind, op.microbatch)][1] + travel_us(cluster, sender, receiver, size)
                for source, sender, receiver, size in feeds(placement, task)
            ]
            before = [(r, plan.orders[r][plan.orders[r].index(op) - 1]) for r in task.ranks if plan.orders[r][0] != op]
            free = [at[done][1] for done in before]
            assert start == max([0, *arrivals, *free])
            assert i == 0 or start >= at[rank, order[i - 1]][1]  # said once more: ops of a rank never overlap


@given(plans())
@settings(max_examples=some(200))
def test_transfers_start_when_their_producer_ends_and_do_not_contend(plan: Plan) -> None:
    placement, timeline = plan.placement, simulate(plan)
    at = times(timeline)
    expected = []
    for task in placement.tasks:
        for source, sender, receiver, size in feeds(placement, task):
            for m in placement.microbatches(task.stage, plan.num_microbatches) if sender != receiver else ():
                made, reader = Op(source.stage, source.kind, m), Op(task.stage, task.kind, m)
                start = at[sender, made][1]
                end = start + travel_us(placement.cluster, sender, receiver, size)
                expected.append((sender, start, end, Transfer(made, reader, sender, receiver, size)))
    assert sorted(timeline.transfer_spans()) == sorted(expected)


@given(plans())
@settings(max_examples=some(200))
def test_makespan_ends_with_the_last_work_and_respects_its_bounds(plan: Plan) -> None:
    placement, timeline = plan.placement, simulate(plan)
    ends = step_end_times(timeline)
    assert list(timeline.step_ends_us) == ends
    last_op = max(end for _, end in times(timeline).values())
    assert timeline.makespan_us == max([last_op, *(end for row in ends for end in row)])

    arrives: dict[Op, int] = {}  # the critical path of one micro-batch, each op alone on its ranks
    for op in sorted((op for op in set().union(*plan.orders)), key=lambda op: len(_ancestors(placement, op))):
        task = placement.task(op.stage, op.kind)
        inputs = [
            arrives[Op(source.stage, source.kind, op.microbatch)] + travel_us(placement.cluster, a, b, size)
            for source, a, b, size in feeds(placement, task)
        ]
        arrives[op] = max(inputs, default=0) + task.duration_us
    assert timeline.makespan_us >= max(arrives.values())

    reductions = [0] * plan.num_ranks
    loads = [sum(placement.task(op.stage, op.kind).duration_us for op in order) for order in plan.orders]
    for i, rank in plan.step_end_ranks:
        loads[rank] += placement.step_ends[i].optimizer_us
        reductions[rank] += placement.step_ends[i].reduce_us + placement.step_ends[i].optimizer_us
    assert timeline.makespan_us >= max(*loads, *reductions)


def _ancestors(placement: Placement, op: Op) -> set[Op]:
    before = set(read_by(placement, op))
    return before.union(*(_ancestors(placement, other) for other in before))


@given(wired_plans())
@settings(max_examples=some(400))
def test_shared_links_match_a_count_of_every_microsecond(plan: Plan) -> None:
    timeline, counted = simulate(plan), counting.recount(plan)
    at = times(timeline)
    assert at == {key: entry[:2] for key, entry in counted.ops.items()}
    expected = [(each.transfer.sender, each.sent_us, each.arrived_us, each.transfer) for each in counted.messages]
    assert sorted(timeline.transfer_spans()) == sorted(expected)
    ends = counting.step_end_times(plan, counted)
    assert list(timeline.step_ends_us) == ends
    assert timeline.makespan_us == max([counted.makespan_us, *(end for row in ends for end in row)])
    assert timeline.span_us == max(_window(counted, rank) for rank in range(plan.num_ranks))


def _window(counted: counting.Recount, rank: int) -> int:
    mine = [entry[2:] for (on, _), entry in counted.ops.items() if on == rank]
    return max(until for _, until in mine) - min(since for since, _ in mine) if mine else 0


@given(wired_plans())
@settings(max_examples=some(200))
def test_the_order_of_first_come_first_served_written_down_changes_nothing(plan: Plan) -> None:
    plan = replace(plan, service_orders=())
    found = [[(time, node) for node in nodes for time in [plan.earliest.starts_us[node]]] for nodes in plan.served]
    assert all(order == sorted(order) for order in found)
    nodes = dict(plan.services.transfers())
    written = replace(plan, service_orders=tuple(tuple(nodes[node] for node in order) for order in plan.served))
    assert simulate(written).ends_us == simulate(plan).ends_us
    assert simulate(written).sent_us == simulate(plan).sent_us
    assert written.served == plan.served


def test_a_shared_link_by_hand() -> None:
    """Rank 0 sends 8 bytes to rank 1 and 8 to rank 2 over one host: 4 bytes per µs, and 1 µs until they arrive."""
    tasks = tuple(Task(stage, F, (stage,), 3) for stage in range(3))
    host = SharedLink("host", 4, (0,), (1, 2))
    placement = Placement(tasks, (Edge(0, 1, 8), Edge(0, 2, 8)), Cluster((None,) * 3, Link(1, 8), shared=(host,)))
    plan = Plan(placement, 1, tuple((Op(stage, F, 0),) for stage in range(3)))
    timeline = simulate(plan)
    assert (timeline.sent_us, timeline.arrived_us) == (((3,), (5,)), ((6,), (8,)))
    assert timeline.makespan_us == 11
    swapped = replace(plan, service_orders=((plan.placement.transfer(1, 0), plan.placement.transfer(0, 0)),))
    assert simulate(swapped).sent_us == ((5,), (3,))
    path = [(str(span.work), span.start_us, span.end_us) for span in timeline.critical_path()]
    assert path == [("0F0", 0, 3), ("0F0→1F0", 3, 5), ("0F0→2F0", 5, 8), ("2F0", 8, 11)]


def test_a_chain_by_hand() -> None:
    costs = Costs((2, 3), (4, 5), boundary_bytes=10, reduce_us=1, optimizer_us=(1, 2))
    placement = place(costs, Cluster((None, None), Link(1, 4)))  # 1 + ceil(10 / 4) = 4
    timeline = simulate(schedules.gpipe(placement, 2))
    assert timeline.starts_us == ((0, 2, 21, 26), (6, 9, 12, 17))
    assert timeline.ends_us == ((2, 4, 25, 30), (9, 12, 17, 22))
    assert timeline.sent_us == ((2, 4), (17, 22))
    assert timeline.arrived_us == ((6, 8), (21, 26))
    assert timeline.step_ends_us == ((30, 31, 31, 32), (22, 23, 23, 25))
    assert timeline.makespan_us == 32
    assert timeline.span_us == 30
    assert timeline.busy_us == (12, 16)
    assert timeline.idle_us == (20, 16)
    assert timeline.bubble_fraction == 36 / 64


def test_a_task_on_several_ranks_waits_for_the_latest_arrival_and_all_its_ranks() -> None:
    pair, one = (1, 2), (0,)
    slow = ((0, 2, Link(7)),)
    tasks = (Task(0, F, one, 1), Task(1, F, pair, 1), Task(2, F, (2,), 5))
    placement = Placement(tasks, (Edge(0, 1), Edge(0, 2)), Cluster((None,) * 3, Link(2), slow))
    a, b, c = (Op(stage, F, 0) for stage in range(3))
    fed_first = simulate(Plan(placement, 1, ((a,), (b,), (b, c))))
    assert fed_first.starts_us == ((0,), (8,), (8, 9))
    busy_first = simulate(Plan(placement, 1, ((a,), (b,), (c, b))))
    assert busy_first.starts_us == ((0,), (13,), (8, 13))


def test_equally_many_ranks_feed_each_other_rank_by_rank() -> None:
    tasks = (Task(0, F, (0, 1), 1), Task(1, F, (1, 2), 1))
    links = ((0, 1, Link(3)), (1, 2, Link(5)), (0, 2, Link(100)))
    placement = Placement(tasks, (Edge(0, 1),), Cluster((None,) * 3, Link(), links))
    assert simulate(deal(placement, 1, [Op(0, F, 0), Op(1, F, 0)])).starts_us == ((0,), (0, 6), (6,))


def test_reductions_follow_each_other_beside_the_ops_and_optimizer_steps_come_last() -> None:
    tasks = tuple(Task(stage, kind, (0,), 1) for stage in (0, 1) for kind in (F, B))
    ends = (StepEnd(0, 10, 1), StepEnd(1, 2, 2))
    edges = (Edge(0, 1), Edge(2, 3), Edge(0, 2))
    placement = Placement(tasks, edges, Cluster.uniform(1), step_ends=ends)
    order = tuple(Op(stage, kind, 0) for stage, kind in ((0, F), (1, F), (1, B), (0, B)))
    plan = Plan(placement, 1, (order,))
    assert plan.step_end_ranks == ((1, 0), (0, 0))  # as their last gradients follow each other
    assert simulate(plan).step_ends_us == ((3, 5, 15, 17), (5, 15, 17, 18))


def test_orders_that_contradict_dependencies_are_refused() -> None:
    placement = place(Costs.uniform(1), Cluster.uniform(1))
    with pytest.raises(PlanError, match="cycle") as caught:
        simulate(Plan(placement, 1, ((Op(0, B, 0), Op(0, F, 0)),)))
    assert caught.value.reason == "cycle"


def test_a_step_ends_where_the_weight_gradients_are() -> None:
    tasks = (Task(0, Kind.F, (0,), 5), Task(0, Kind.B, (1,), 5))
    placement = Placement(tasks, (Edge(0, 1),), Cluster.uniform(2), step_ends=(StepEnd(0, 3, 1),))
    timeline = simulate(Plan(placement, 1, ((Op(0, Kind.F, 0),), (Op(0, Kind.B, 0),))))
    assert timeline.plan.step_end_ranks == ((0, 1),)
    assert timeline.step_ends_us == ((10, 13, 13, 14),)
