"""Records of several clocks become one timeline."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings

from rota import Cause, Costs, Edge, Kind, Op, Placement, Plan, Task, Timeline, calibrated, idle, place, simulate
from rota.accounting.comparison import Part, compare
from rota.core.cluster import Cluster, Link, SharedLink
from rota.runtime.recorder import Record, merge
from rota.schedules import forward_only, gpipe
from support.core_strategies import wired_plans
from support.sampling import some

MS = 1_000_000


def plan_of_two(num_microbatches: int = 1, **costs: int) -> Plan:
    return gpipe(place(Costs.uniform(2, **costs), Cluster.uniform(2)), num_microbatches)


def records(offset_ns: int = 0, through_ms: tuple[float, float] = (12, 32)) -> list[Record]:
    """One micro-batch: 0F 0-10, sent, 1F 13-20, 1B 20-30, sent, 0B 33-50 (ms of rank 0's clock, from 1000 on)."""

    def at(rank: int, *times: float) -> list[int]:
        return [int((1000 + ms) * MS) - rank * offset_ns for ms in times]

    return [
        Record(0, 0, at(0, 0, 33), at(0, 10, 50), [(0, 0, *at(0, 10.25, through_ms[0]))]),
        Record(1, offset_ns, at(1, 13, 20), at(1, 20, 30), [(1, 0, *at(1, 30, through_ms[1]))]),
    ]


def test_offsets_and_order_of_records_make_no_difference() -> None:
    expected = merge(plan_of_two(), records())
    for offset_ns in (-7 * MS, 123_456_789_000, -(10**15)):
        assert merge(plan_of_two(), records(offset_ns)) == expected
        assert merge(plan_of_two(), records(offset_ns)[::-1]) == expected


def test_a_sender_that_hears_late_does_not_move_the_arrival_behind_its_reader() -> None:
    timeline = merge(plan_of_two(), records(through_ms=(49, 49)))
    assert timeline.arrived_us == ((13_000,), (33_000,))


def test_clocks_that_disagree_never_make_a_transfer_end_before_it_starts() -> None:
    skewed = records()
    skewed[1].offset_ns = -5 * MS  # rank 1 seems to read before rank 0 sends
    timeline = merge(plan_of_two(), skewed)
    assert timeline.sent_us == ((10_250,), (25_000,))
    assert timeline.arrived_us == ((10_250,), (27_000,))


def test_reductions_are_told_by_stage_also_where_the_plan_has_none() -> None:
    for costs in ({}, {"reduce_us": 5}):
        skewed = records(7 * MS)
        skewed[1].reductions = [(1, 1030 * MS - 7 * MS, 1055 * MS - 7 * MS)]
        timeline = merge(plan_of_two(**costs), skewed)
        ends = {(timeline.plan.placement.step_ends[i].stage, rank): i for i, rank in timeline.plan.step_end_ranks}
        assert {*ends} == ({(0, 0), (1, 1)} if costs else {(1, 1)})
        assert timeline.step_ends_us[-1] == (30_000, 55_000, 55_000, 55_000)
        assert timeline.makespan_us == 55_000
        assert timeline.plan.orders == plan_of_two().orders
        (span,) = timeline.step_end_spans()
        assert str(span.work) == "1 reduce"


def test_reductions_of_a_rank_are_told_one_after_the_other() -> None:
    placement = place(Costs.uniform(3), Cluster.uniform(1), [0, 0, 0])
    plan = gpipe(placement, 1)
    record = Record(0, 0, [i * 10 * MS for i in range(6)], [(i + 1) * 10 * MS for i in range(6)])
    record.reductions = [(2, 40 * MS, 90 * MS), (1, 50 * MS, 70 * MS), (0, 60 * MS, 120 * MS)]
    timeline = merge(plan, [record])
    at = {str(span.work): (span.start_us, span.end_us) for span in timeline.step_end_spans()}
    assert at == {"2 reduce": (40_000, 90_000), "0 reduce": (90_000, 120_000)}  # 1's was done beside 2's
    assert timeline.makespan_us == 120_000
    path = timeline.critical_path()
    assert all(a.end_us <= b.start_us for a, b in pairwise(path))
    assert str(path[-1].work) in ("0 reduce", "0 optimizer", "1 optimizer", "2 optimizer")


def test_steps_end_where_the_ranks_last_op_does() -> None:
    timeline = merge(plan_of_two(reduce_us=5, optimizer_us=5), records())
    assert timeline.step_ends_us == ((50_000,) * 4, (30_000,) * 4)
    assert timeline.makespan_us == 50_000


def test_the_cores_that_ranks_share_are_noted() -> None:
    placement = place(Costs.uniform(1, 10, 20), Cluster.uniform(1))
    record = Record(0, 0, [0], [10_000], num_cores=2)
    assert merge(forward_only(placement.forward_only(), 1), [Record.from_fields(record.to_fields())]).num_cores == 2


# --- shared links: a rank notes when it sends, and when its message is through ----------------------------------------


def recorded(timeline: Timeline) -> list[Record]:
    """What ranks on CPUs would record of a simulated timeline: each message is sent as soon as it is handed over."""
    plan, us = timeline.plan, 1000
    found = [
        Record(rank, 0, [us * t for t in starts], [us * t for t in ends])
        for rank, (starts, ends) in enumerate(zip(timeline.starts_us, timeline.ends_us, strict=True))
    ]
    for r, route in enumerate(plan.placement.routes):
        for k, (sent, arrived) in enumerate(zip(timeline.handed_over_us(r), timeline.arrived_us[r], strict=True)):
            found[route.sender].messages.append((r, k, us * sent, us * arrived))
    return found


@given(wired_plans())
@settings(max_examples=some(200))
def test_when_shared_links_began_to_serve_a_message_is_found(plan: Plan) -> None:
    planned = simulate(plan)
    origin_us = min(starts[0] for starts in planned.starts_us if starts)

    def from_origin(times_us: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(max(time - origin_us, 0) for time in column) for column in times_us)

    measured = merge(plan, recorded(planned))
    for name in ("starts_us", "ends_us", "sent_us", "arrived_us"):
        assert getattr(measured, name) == from_origin(getattr(planned, name)), name


def test_a_longer_wait_for_a_link_is_not_a_longer_transfer() -> None:
    """The host serves the message to rank 1 after the one to rank 2, and not before it as planned."""
    tasks = tuple(Task(stage, Kind.F, (stage,), us) for stage, us in enumerate((10, 50, 5)))
    host = SharedLink("host", 1, (0,), (1, 2))
    placement = Placement(tasks, (Edge(0, 1, 40), Edge(0, 2, 40)), Cluster((None,) * 3, Link(2), shared=(host,)))
    planned = simulate(Plan(placement, 1, tuple((Op(stage, Kind.F, 0),) for stage in range(3))))
    assert (planned.arrived_us, planned.makespan_us) == (((52,), (92,)), 102)
    late = replace(planned, arrived_us=((92,), (52,)), starts_us=((0,), (92,), (52,)), ends_us=((10,), (142,), (57,)))
    measured = merge(planned.plan, recorded(late))
    assert measured.sent_us == ((50,), (10,))
    assert {part: us for part, us in compare(planned, measured).parts_us.items() if us} == {Part.SHARED_LINKS: 40}
    waits = [each.end_us - each.start_us for each in idle(measured, planned) if each.cause is Cause.SHARED_LINK]
    assert waits == [40]


@pytest.mark.parametrize("divides", [False, True])
def test_a_link_may_serve_one_by_one_or_divide_its_rate(divides: bool) -> None:
    """Three messages of 10 µs at once: they arrive one by one, or all in the end. None of them is slow."""
    tasks = tuple(Task(stage, Kind.F, (stage,), 10) for stage in range(4))
    host = SharedLink("host", 8, (0,), (1, 2, 3))
    edges = tuple(Edge(0, reader, 80) for reader in (1, 2, 3))
    placement = Placement(tasks, edges, Cluster((None,) * 4, Link(3), shared=(host,)))
    planned = simulate(Plan(placement, 1, tuple((Op(stage, Kind.F, 0),) for stage in range(4))))
    arrived = (43, 43, 43) if divides else (23, 33, 43)
    assert divides or planned.arrived_us == tuple((us,) for us in arrived)
    late = replace(
        planned,
        arrived_us=tuple((us,) for us in arrived),
        starts_us=((0,), *((us,) for us in arrived)),
        ends_us=((10,), *((us + 10,) for us in arrived)),
    )
    measured = merge(planned.plan, recorded(late))
    assert measured.sent_us == tuple((us - 13,) for us in arrived)
    assert calibrated(measured).routes == placement.routes
    assert not any(compare(planned, measured).parts_us.values())
