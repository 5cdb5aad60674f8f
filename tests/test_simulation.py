"""The simulated times are the earliest that the definition allows, and no earlier."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings

from rota import schedules
from rota.core.cluster import Cluster, Link
from rota.core.costs import Costs
from rota.core.placing import place
from rota.core.plan import Plan
from rota.core.simulation import simulate
from rota.core.tasks import Kind, Op
from rota.core.timeline import Timeline
from support import recount as counting
from support.core_strategies import differing_plans, plans, wired_plans
from support.sampling import some

F, B = Kind.F, Kind.B


def times(timeline: Timeline) -> dict[tuple[int, Op], tuple[int, int]]:
    """(rank, op) -> (start, end), read from the columns."""
    return {
        (rank, op): (timeline.starts_us[rank][i], timeline.ends_us[rank][i])
        for rank, order in enumerate(timeline.plan.orders)
        for i, op in enumerate(order)
    }


@given(plans() | wired_plans() | differing_plans() | differing_plans(wired=True))
@settings(max_examples=some(600))
def test_all_times_match_a_count_of_every_microsecond(plan: Plan) -> None:
    timeline, counted = simulate(plan), counting.recount(plan)
    at = times(timeline)
    assert at == counted.ops
    expected = [(each.transfer.sender, each.sent_us, each.arrived_us, each.transfer) for each in counted.messages]
    assert sorted(timeline.transfer_spans()) == sorted(expected)
    ends = counting.step_end_times(plan, counted)
    assert list(timeline.step_ends_us) == ends
    assert timeline.makespan_us == max([counted.makespan_us, *(end for row in ends for end in row)])
    assert timeline.span_us == max(_window(counted, rank) for rank in range(plan.num_ranks))


def _window(counted: counting.Recount, rank: int) -> int:
    spans = [span for (on, _), span in counted.ops.items() if on == rank]
    return max(end for _, end in spans) - min(start for start, _ in spans) if spans else 0


@given(wired_plans())
@settings(max_examples=some(200))
def test_the_order_of_first_come_first_served_written_down_changes_nothing(plan: Plan) -> None:
    plan = replace(plan, service_orders=())
    found = [[(time, node) for node in nodes for time in [plan.earliest.starts_us[node]]] for nodes in plan.served]
    assert all(order == sorted(order) for order in found)
    nodes = dict(plan.shared_transfers.transfers())
    written = replace(plan, service_orders=tuple(tuple(nodes[node] for node in order) for order in plan.served))
    assert simulate(written).ends_us == simulate(plan).ends_us
    assert simulate(written).sent_us == simulate(plan).sent_us
    assert written.served == plan.served


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
