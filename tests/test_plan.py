"""Plans: their graph, orders of service, and their text."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings

from rota import Cluster, Costs, Link, Plan, SharedLink, Transfer, check, place, schedules
from rota.core.errors import FormatError, PlanError, RotaError
from support.core_strategies import every_op, plans, read_by, wired_plans
from support.sampling import some

PLAN = schedules.one_f_one_b(
    place(Costs.uniform(2, reduce_us=2), Cluster((None, 99), Link(1, 2), ((0, 1, Link(3)),))), num_microbatches=3
)


@given(plans())
@settings(max_examples=some(150))
def test_nodes_number_every_op_once(plan: Plan) -> None:
    ops = [plan.op(node) for node in range(plan.num_ops)]
    assert sorted(ops) == sorted(every_op(plan.placement, plan.num_microbatches))
    assert [plan.node(op) for op in ops] == list(range(plan.num_ops))
    assert plan.nodes == tuple(tuple(map(plan.node, order)) for order in plan.orders)


@given(plans() | wired_plans())
@settings(max_examples=some(300))
def test_the_wire_order_holds_everything_after_what_it_needs(plan: Plan) -> None:
    position = {action: i for i, action in enumerate(plan.wire_order)}
    assert set(every_op(plan.placement, plan.num_microbatches)) | set(plan.transfers) == set(position)
    assert len(plan.wire_order) == plan.num_ops + len(plan.transfers)
    for order in plan.orders:
        assert [position[op] for op in order] == sorted(position[op] for op in order)
    for op in every_op(plan.placement, plan.num_microbatches):
        assert all(position[before] < position[op] for before in read_by(plan.placement, op))
    for transfer in plan.transfers:
        assert position[transfer.source] < position[transfer] < position[transfer.target]


@given(wired_plans())
@settings(max_examples=some(300))
def test_each_rank_sends_in_the_order_of_service(plan: Plan) -> None:
    sent_us = plan.earliest.starts_us
    for nodes in plan.served:
        transfers = dict(plan.shared_transfers.transfers())
        by_sender: dict[int, list[Transfer]] = {}
        for node in nodes:
            by_sender.setdefault(transfers[node].sender, []).append(transfers[node])
        for sent in by_sender.values():
            wire = [action for action in plan.wire_order if isinstance(action, Transfer) and action in sent]
            assert wire == sent
        assert all(sent_us[a] < sent_us[b] for a, b in pairwise(nodes))


def hosted(num_microbatches: int = 2) -> Plan:
    """Two ranks whose transfers share a host, served in the order that first come first served gives."""
    host = SharedLink("host a", 1, (0, 1), (0, 1))
    cluster = Cluster((None, None), Link(1, 2), shared=(host,))
    plan = schedules.gpipe(place(Costs.uniform(2, boundary_bytes=8), cluster), num_microbatches)
    transfers = dict(plan.shared_transfers.transfers())
    return replace(plan, service_orders=(tuple(transfers[node] for node in plan.served[0]),))


def test_a_transfer_that_is_served_late_is_sent_before_the_op_that_runs_then() -> None:
    assert [
        str(action) for action in hosted().wire_order if not isinstance(action, Transfer) or action.sender == 0
    ] == [*("0F0", "0F0→1F0", "0F1", "0F1→1F1", "1F0", "1F1", "1B0", "1B1", "0B0", "0B1")]
    tasks_first = hosted(3)  # the host is slower than the ops: transfers wait until rank 0 is done
    assert [t.source.microbatch for t in tasks_first.transfers if t.sender == 0] == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "reason", "told"),
    [
        (lambda order: (order[1:],), "missing", "host a never serves 0F0→1F0; add it there"),
        (lambda order: ((*order, order[0]),), "duplicate", "host a serves 0F0→1F0 twice; remove one of them"),
        (
            lambda order: ((*order, order[0]._replace(num_bytes=9)),),
            "unknown",
            "host a serves 0F0→1F0, a transfer that does not use it; remove it",
        ),
        (lambda order: (order, order), "unknown", "the plan has 2 service orders for 1 shared links"),
        (lambda order: (order[::-1],), "cycle", "the orders wait in a cycle: "),
    ],
)
def test_wrong_orders_of_service_are_refused(
    change: Callable[[tuple[Transfer, ...]], tuple[tuple[Transfer, ...], ...]], reason: str, told: str
) -> None:
    plan = hosted()
    wrong = replace(plan, service_orders=change(plan.service_orders[0]))
    for given_plan in (wrong, Plan.from_json(wrong.to_json())) if "9" not in repr(wrong.service_orders) else (wrong,):
        with pytest.raises(PlanError) as caught:
            check(given_plan)
        assert (caught.value.reason, told in str(caught.value)) == (reason, True)


def test_a_cycle_through_an_order_of_service_is_told_wait_by_wait() -> None:
    plan = hosted(1)
    forward, back = plan.service_orders[0]
    with pytest.raises(PlanError) as caught:
        check(replace(plan, service_orders=((back, forward),)))
    waits = set(str(caught.value).removeprefix("the orders wait in a cycle: ").split("; "))
    assert waits == {
        "0F0→1F0 comes after 1B0→0B0 in the order of host a",
        "1B0→0B0 carries what 1B0 makes",
        "1B0 reads what 1F0 makes",
        "1F0 reads what 0F0→1F0 carries",
    }


def test_an_order_of_service_without_a_shared_link_is_refused() -> None:
    with pytest.raises(PlanError, match="the plan has 1 service orders for 0 shared links"):
        check(replace(PLAN, service_orders=((),)))


def changed(**fields: object) -> str:
    return json.dumps({**json.loads(PLAN.to_json()), **fields})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[1, 2", "not JSON: Expecting ',' delimiter at line 1, column 6"),
        (changed(rota="costs"), 'not a plan file: it says "rota": "costs"'),
        (changed(num_microbatches=0), "plan.num_microbatches is 0; expected 1 or more"),
        (changed(orders=["0F0", "1F0 1Q0"]), "plan.orders[1], op 2: '1Q0' is not an op"),
        (changed(tasks=[["0F", [0], 1, 0]]), 'plan.tasks[0] is ["0F", [0], 1, 0]; expected a list of length 5'),
        (changed(tasks=[["0F", [0], -1, 0, 0]]), "duration_us of task 0F is -1"),
        (changed(usge={}), 'plan has the field "usge", which is not known there; remove or rename it'),
        (changed(usage={"cuts": [], "microbatch_rows": 1, "num_replica": 2}), 'usage has the field "num_replica"'),
        (changed(edges=[["0F", "7F", 0]]), 'plan.edges[0] has "7F"; expected the name of a task, such as 0F'),
        (changed(edges=[["0F", "1F", -4]]), "num_bytes of the edge 0F -> 1F is -4: give a whole number of 0 or more"),
        (changed(cluster={"limit_bytes": [1]}), "plan.cluster has no field 'link'; it has limit_bytes"),
    ],
)
def test_what_is_wrong_is_told_with_place_and_value(text: str, told: str) -> None:
    with pytest.raises(RotaError) as caught:
        Plan.from_json(text)
    assert told in str(caught.value)


@pytest.mark.parametrize("entry", ["0F0>1F0", "0F0>1F0@1#1", "0F0>1F1@1", "0F0>1B0@1", "0F0>1F0>1B0@1"])
def test_what_is_no_transfer_is_refused_with_one_that_is(entry: str) -> None:
    document = json.loads(hosted().to_json()) | {"service_orders": [entry]}
    with pytest.raises(FormatError) as caught:
        Plan.from_json(json.dumps(document))
    assert str(caught.value) == (f'plan.service_orders[0]: "{entry}" is not a transfer; expected one such as 0F0>1F0@1')
