"""Every way to break a plan is refused for the right reason, and the message can be believed."""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings, strategies as st

from rota import Cluster, Costs, Edge, Kind, Op, Placement, Plan, PlanError, Task, check, place, schedules, simulate
from support.core_strategies import Chooser, deal, differing_plans, plans, read_by, with_limits
from support.sampling import some

Orders = list[list[Op]]
choosers = st.integers(0, 2**16).map(Chooser)


def refusal(plan: Plan) -> PlanError:
    with pytest.raises(PlanError) as caught:
        check(plan)
    return caught.value


# Each breaks the orders in place, and may find that it cannot.


def pick(orders: Orders, chooser: Chooser) -> tuple[int, int]:
    """A random op: its rank and where it is in the rank's order."""
    return chooser.choice([(rank, i) for rank, order in enumerate(orders) for i in range(len(order))])


def removed(plan: Plan, orders: Orders, chooser: Chooser) -> None:
    rank, i = pick(orders, chooser)
    del orders[rank][i]


def duplicated(plan: Plan, orders: Orders, chooser: Chooser) -> None:
    rank, i = pick(orders, chooser)
    orders[rank].insert(chooser.randint(0, len(orders[rank])), orders[rank][i])


def moved(plan: Plan, orders: Orders, chooser: Chooser) -> None:
    rank, i = pick(orders, chooser)
    op = orders[rank][i]
    others = [r for r in range(plan.num_ranks) if r not in plan.placement.task(op.stage, op.kind).ranks]
    assume(others)
    order = orders[chooser.choice(others)]
    order.insert(chooser.randint(0, len(order)), orders[rank].pop(i))


def unknown_stage(plan: Plan, orders: Orders, chooser: Chooser) -> None:
    rank, i = pick(orders, chooser)
    orders[rank][i] = orders[rank][i]._replace(stage=max(plan.placement.stages) + chooser.randint(1, 3))


def unknown_kind(plan: Plan, orders: Orders, chooser: Chooser) -> None:
    rank, i = pick(orders, chooser)
    kinds = [kind for kind in Kind if (orders[rank][i].stage, kind) not in plan.placement.index]
    assume(kinds)
    orders[rank][i] = orders[rank][i]._replace(kind=chooser.choice(kinds))


def unknown_microbatch(plan: Plan, orders: Orders, chooser: Chooser) -> None:
    rank, i = pick(orders, chooser)
    op = orders[rank][i]
    known = plan.placement.microbatches(op.stage, plan.num_microbatches)  # those of another stream are unknown too
    unknown = set(range(-2, plan.num_microbatches + 3)) - set(known)
    orders[rank][i] = op._replace(microbatch=chooser.choice(sorted(unknown)))


REASONS: dict[Callable[[Plan, Orders, Chooser], None], str] = {
    removed: "missing",
    duplicated: "duplicate",
    moved: "wrong rank",
    unknown_stage: "unknown",
    unknown_kind: "unknown",
    unknown_microbatch: "unknown",
}


@pytest.mark.parametrize("break_", REASONS, ids=lambda function: function.__name__)
@given(plan=plans(), chooser=choosers)
@settings(max_examples=some(40))
def test_a_broken_plan_is_refused_for_the_right_reason(
    break_: Callable[[Plan, Orders, Chooser], None], plan: Plan, chooser: Chooser
) -> None:
    orders = [list(order) for order in plan.orders]
    break_(plan, orders, chooser)
    broken = replace(plan, orders=tuple(map(tuple, orders)))
    error = refusal(broken)
    assert error.reason == REASONS[break_]
    rank, op = re.match(r"rank (\d+) (?:does|never does) (\d+[A-Z]-?\d+)", str(error)).groups()
    names = [str(op) for op in broken.orders[int(rank)]]
    assert names.count(op) == {"missing": 0, "duplicate": 2}.get(error.reason, 1)


def believe_cycle(plan: Plan, message: str) -> None:
    """The waits that `message` tells are real, each for the one in the next line, and they close."""
    head, _, told = message.partition(": ")
    assert head == "the orders wait in a cycle"
    waits: list[tuple[Op, Op] | None] = []
    for line in told.split("; "):
        if match := re.fullmatch(r"(\w+) reads what (\w+) makes", line):
            op, other = map(Op.parse, match.groups())
            assert other in read_by(plan.placement, op)
        elif match := re.fullmatch(r"(\w+) comes after (\w+) in rank (\d+)'s order", line):
            op, other = map(Op.parse, match.groups()[:2])
            order = plan.orders[int(match[3])]
            assert order.index(op) > order.index(other)
        else:
            assert re.fullmatch(r"… \d+ more waits …", line)
            waits.append(None)
            continue
        waits.append((op, other))
    for wait, following in zip(waits, waits[1:] + waits[:1], strict=True):
        assert wait is None or following is None or wait[1] == following[0]


@given(plans(), choosers)
@settings(max_examples=some(150))
def test_shuffled_orders_pass_exactly_if_nothing_waits_in_a_cycle(plan: Plan, chooser: Chooser) -> None:
    orders = [list(order) for order in plan.orders]
    for order in orders:
        for _ in range(chooser.randint(0, 2) if order else 0):
            i = chooser.randrange(len(order))
            order.insert(chooser.randrange(len(order)), order.pop(i))
    needs = {op: set(read_by(plan.placement, op)) for order in orders for op in order}
    for order in orders:
        for before, op in pairwise(order):
            needs[op].add(before)
    while free := [op for op, before in needs.items() if not before & needs.keys()]:
        for op in free:
            del needs[op]
    shuffled = replace(plan, orders=tuple(map(tuple, orders)))
    if needs:
        error = refusal(shuffled)
        assert error.reason == "cycle"
        believe_cycle(shuffled, str(error))
    else:
        check(shuffled)


def test_a_long_cycle_is_told_in_short() -> None:
    n = 40
    placement = place(Costs.uniform(n), Cluster.uniform(n))
    orders = [list(order) for order in schedules.gpipe(placement, 1).orders]
    orders[0].reverse()
    broken = Plan(placement, 1, tuple(map(tuple, orders)))
    message = str(refusal(broken))
    assert "… 68 more waits …" in message
    believe_cycle(broken, message)


@given(plans() | differing_plans(), choosers)
@settings(max_examples=some(300))
def test_a_limit_holds_to_the_byte(plan: Plan, chooser: Chooser) -> None:
    timeline = simulate(plan)
    peaks = timeline.peak_memory_bytes
    check(with_limits(plan, peaks))
    over = [rank for rank, peak in enumerate(peaks) if peak > 0]
    assume(over)
    rank = chooser.choice(over)
    peak = peaks[rank]
    error = refusal(with_limits(plan, (peak - (r == rank) for r, peak in enumerate(peaks))))
    assert error.reason == "memory"
    assert f"over its limit of {exactly(peak - 1)}" in str(error)
    if plan.placement.static_bytes[rank] == peak:
        assert f"rank {rank} holds {exactly(peak)} before its first op" in str(error)
    else:
        rank_and_op = f"rank {rank} would hold {re.escape(exactly(peak))} at (\\w+),"
        assert Op.parse(re.match(rank_and_op, str(error))[1]) in plan.orders[rank]
        assert f"(its peak is {exactly(peak)})" in str(error)


def exactly(num_bytes: int) -> str:
    return f"{num_bytes} B ({num_bytes} bytes)"


@pytest.mark.parametrize(
    ("orders", "num_microbatches", "reason", "told"),
    [
        ((), 1, "unknown", "the plan has 0 rank orders, but its placement has 2 ranks; give one order per rank"),
        (((), ()), 0, "missing", "num_microbatches is 0; a step needs at least 1"),
        (((), ()), 2, "missing", "rank 0 never does 0F0 and 3 more; add it there, or lower num_microbatches"),
        (((Op(7, Kind.F, 0),), ()), 1, "unknown", "0 does 7F0, which the placement does not know (there are 2 stages)"),
        (((Op(0, Kind.W, 0),), ()), 1, "unknown", "0 does 0W0, which the placement does not know (stage 0 has B F)"),
        (((Op(0, Kind.F, 3),), ()), 2, "unknown", "rank 0 does 0F3, but stage 0 has the micro-batches 0 to 1"),
        (((Op(1, Kind.F, 0),), ()), 1, "wrong rank", "rank 0 does 1F0, but stage 1 is on rank 1; move it there"),
    ],
)
def test_messages(orders: tuple[tuple[Op, ...], ...], num_microbatches: int, reason: str, told: str) -> None:
    error = refusal(Plan(place(Costs.uniform(2), Cluster.uniform(2)), num_microbatches, orders))
    assert error.reason == reason
    assert told in str(error)


def test_a_micro_batch_of_another_stream_is_unknown() -> None:
    placement = Placement((Task(0, Kind.F, (0,), 1), Task(1, Kind.F, (0,), 1)), (), Cluster.uniform(1))
    check(deal(placement, 3, [Op(1, Kind.F, 1), Op(0, Kind.F, 2), Op(0, Kind.F, 0)]))
    error = refusal(deal(placement, 3, [Op(1, Kind.F, 1), Op(0, Kind.F, 1)]))
    assert str(error) == "rank 0 does 0F1, but stage 0 has the micro-batches 0 to 2 in steps of 2"


def test_overflow_names_the_op_that_overflows_among_ops_of_no_duration() -> None:
    tasks = (Task(0, Kind.F, (0,), 0, peak_bytes=100), Task(1, Kind.F, (0,), 0))
    plan = Plan(Placement(tasks, (Edge(0, 1),), Cluster((50,))), 1, ((Op(0, Kind.F, 0), Op(1, Kind.F, 0)),))
    with pytest.raises(PlanError, match=r"rank 0 would hold 100 B \(100 bytes\) at 0F0"):
        check(plan)
