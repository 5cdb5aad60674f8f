"""No plan that `check` accepts can hang on a device with streams; wrong orders are refused, with the kernels named."""

import os
import random
import re
from itertools import pairwise

import pytest

from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.errors import PlanError
from rota.core.placing import bidirectional, place
from rota.core.plan import Plan
from rota.core.programs.device_order import check_device_order, prove
from rota.core.programs.device_steps import device_programs
from rota.schedules import FAMILIES, Family, gpipe, one_f_one_b
from support.device_orders import (
    NUMBERS_OF_RANKS,
    Programs,
    family_plans,
    in_order,
    replicated,
    swapped_on_a_channel,
    with_early_receives,
    with_pair_communicators,
)
from support.random_plans import random_plan, with_random_wires
from support.sampling import some

NUM_RANDOM_PLANS = int(os.environ.get("ROTA_RANDOM_DEVICE_ORDERS", some(1200)))
NUM_PARTS = 8
FORWARD_ONLY = "forward_only"


def refusal(programs: Programs, serial: bool = True) -> str:
    with pytest.raises(PlanError) as caught:
        prove(programs, serial=serial)
    assert caught.value.reason == "device order"
    return str(caught.value)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_no_family_can_hang(family: Family) -> None:
    plans = [*family_plans([family])]
    assert len(plans) > len(NUMBERS_OF_RANKS)
    for plan in plans:
        proved = check_device_order(plan, tied=[(0, plan.num_ranks - 1)])
        assert proved.num_ranks == plan.num_ranks
        assert proved.num_collectives == 1
        num_messages = 2 * len(plan.transfers)
        num_reduced = sum(len({*op_stages(plan, rank)}) for rank in range(plan.num_ranks))
        assert proved.num_kernels == plan.num_ops + num_messages + num_reduced + 2


def op_stages(plan: Plan, rank: int) -> list[int]:
    return [op.stage for op in plan.orders[rank] if op.kind.makes_weight_gradients]


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_no_random_plan_can_hang(part: int) -> None:
    """Chains and DAGs with skips, forwards only, stages on several ranks, micro-batches in any order."""
    for seed in range(part, NUM_RANDOM_PLANS, NUM_PARTS):
        plan = random_plan(seed, 2 + seed % 7)[1]
        check_device_order(plan, tied=[(1, 0), tuple(range(plan.num_ranks))])


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_no_order_of_service_can_hang(part: int) -> None:
    """Transfers that wait for shared links are sent later than they are made, between ops that come after."""
    late = 0
    for seed in range(part, NUM_RANDOM_PLANS // 4, NUM_PARTS):
        plan = with_random_wires(random_plan(seed, 2 + seed % 7)[1], seed)
        check_device_order(plan, tied=[(1, 0), tuple(range(plan.num_ranks))])
        position = {action: i for i, action in enumerate(plan.wire_order)}
        next_op = {a: b for order in plan.orders for a, b in pairwise(order)}
        late += sum(position.get(next_op.get(t.source), 10**9) < position[t] for t in plan.transfers)
    assert late > NUM_RANDOM_PLANS // 80


def test_stages_on_several_ranks_and_two_directions() -> None:
    placement = place(
        Costs.uniform(4), Cluster.uniform(4), [(0, 1), (2, 3), (1, 0, 2), 3], [(0, 1), (0, 3), (1, 2), (2, 3)]
    )
    assert check_device_order(gpipe(placement, 5)).num_collectives == 3 * 2 * 5
    assert check_device_order(gpipe(bidirectional(Costs.uniform(4), Cluster.uniform(4)), 8)).num_channels == 6


def test_replicas_cannot_hang_either() -> None:
    """Two and three pipelines in one graph, with reductions as collectives: what holds of one holds of all."""
    for seed in range(20):
        programs = device_programs(random_plan(seed, 2 + seed % 4)[1], tied=[(0, 1)])
        for num_replicas in (2, 3):
            proved = prove(replicated(programs, num_replicas))
            assert proved.num_ranks == num_replicas * len(programs)
    for family in ("1f1b", "zb_v", "dualpipe"):
        for plan in family_plans([f for f in FAMILIES if f.name == family], [4]):
            assert prove(replicated(device_programs(plan), 2)).num_collectives > 0


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_receives_that_are_posted_early_hang_a_serial_device(family: Family) -> None:
    for plan in family_plans([family], [2, 5]):
        early = [with_early_receives(program) for program in device_programs(plan)]
        prove(early, serial=False)
        if family.name == FORWARD_ONLY:  # messages in one direction alone
            prove(early)
        else:
            assert re.search(
                r"wait in a cycle on a device that .* order of their launch: rank \d: send", refusal(early)
            )


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_both_directions_in_one_communicator_need_the_strict_order(family: Family) -> None:
    for plan in family_plans([family], [2, 5]):
        strict = device_programs(plan)
        prove([with_pair_communicators(program) for program in strict])
        early = [with_pair_communicators(with_early_receives(program)) for program in strict]
        if family.name != FORWARD_ONLY:
            told = refusal(early, serial=False)
            assert re.match(r"channel \d→\d: operation \d+ is (send|receive) \S+ on rank \d, but", told), told


def test_a_cycle_is_named_kernel_by_kernel() -> None:
    plan = one_f_one_b(place(Costs.uniform(2, 10, 20), Cluster.uniform(2)), 3)
    early = [with_early_receives(program) for program in device_programs(plan)]
    assert refusal(early) == (
        "kernels would wait in a cycle on a device that runs kernels in the order of their launch: "
        "rank 1: send 1B1→0B1 waits for receive 0F2→1F2 (by way of run 1B1, run 1F1), which needs the send of rank 0; "
        "rank 0: send 0F2→1F2 waits for receive 1B1→0B1 (by way of run 0F2, run 0B0), which needs the send of rank 1"
    )


def test_sides_of_a_channel_in_different_orders_are_refused() -> None:
    plan = one_f_one_b(place(Costs.uniform(3), Cluster.uniform(3)), 4)
    for seed in range(20):
        swapped = swapped_on_a_channel(device_programs(plan), random.Random(seed))
        told = refusal(swapped, serial=False)
        assert re.match(r"channel \d→\d: operation \d is (send|receive) \d\w\d→\d\w\d on rank \d, but", told), told
        assert told.endswith("both sides of a communicator must enqueue in the same order")


def test_a_side_that_lacks_a_message_is_refused() -> None:
    placement = place(Costs.uniform(2), Cluster.uniform(2)).forward_only()
    first, second = device_programs(gpipe(placement, 1))
    keep = [i for i, step in enumerate(first.steps) if step.what in ("run", "join")]
    told = refusal([in_order(first, keep), second])
    assert "operation 1 is none on rank 0, but receive 0F0→1F0 on rank 1" in told


def test_sums_of_tied_weights_in_different_orders_are_refused() -> None:
    plan = gpipe(place(Costs.uniform(2), Cluster.uniform(2)), 1)
    one, other = (device_programs(plan, tied=tied) for tied in ([(0, 1), (0, 1)], [(0, 1)]))
    assert "tied weights on ranks 0, 1: operation 2 is sum" in refusal([one[0], other[1]])


def test_a_wait_for_a_later_event_is_refused() -> None:
    """A device would not wait for it at all."""
    plan = gpipe(place(Costs.uniform(2), Cluster.uniform(2)), 1)
    first, second = device_programs(plan)
    order = sorted(range(len(second.steps)), key=lambda i: second.steps[i].what == "receive")
    assert "run 1F0 waits for the event of receive 0F0→1F0, which is enqueued later" in refusal(
        [first, in_order(second, order)]
    )


def test_plans_that_check_refuses_are_refused_for_the_same_reason() -> None:
    plan = gpipe(place(Costs.uniform(2), Cluster.uniform(2)), 2)
    with pytest.raises(PlanError) as caught:
        check_device_order(Plan(plan.placement, 2, (plan.orders[0], plan.orders[1][::-1])))
    assert caught.value.reason == "cycle"
