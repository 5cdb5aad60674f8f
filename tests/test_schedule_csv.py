"""The schedule CSV comes back as it went, nonsense is told, and what it cannot say is refused."""

import random
import re
from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings, strategies as st

from rota import Cluster, Costs, Edge, Kind, Placement, Plan, Task, bidirectional, check, place
from rota.core.errors import FormatError, PlanError, ScheduleError
from rota.schedules.gpipe import forward_only, gpipe
from rota.schedules.one_f_one_b import one_f_one_b
from support.core_strategies import clusters, plans
from support.sampling import some
from support.torch_orders import simulates, theirs

FORMS = [{"communication": c} for c in (False, True)]
PLAN = one_f_one_b(place(Costs.uniform(3), Cluster.uniform(3)), 4)


def test_the_forms() -> None:
    plan = one_f_one_b(place(Costs.uniform(2), Cluster.uniform(2)), 2)
    assert plan.to_csv() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert plan.to_csv(communication=True) == (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD\n"
        "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD\n"
    )
    forward = forward_only(plan.placement.forward_only(), 2)
    assert forward.to_csv(communication=True) == "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1\n"


@st.composite
def chains(draw: st.DrawFn) -> Placement:
    """1 to 5 stages, each on any rank; F alone, with B, or with I and W."""
    n = draw(st.integers(1, 5))
    cluster = draw(clusters())
    given_costs = Costs.uniform(
        n, draw(st.integers(0, 3)), draw(st.integers(0, 3)), draw(st.none() | st.integers(0, 3))
    )
    rank = st.integers(0, cluster.num_ranks - 1)
    placement = place(given_costs, cluster, draw(st.lists(rank, min_size=n, max_size=n)))
    return placement.forward_only() if draw(st.integers(0, 4)) == 0 else placement


@given(plans(chains()))
@settings(max_examples=some(200))
def test_chains_come_back(plan: Plan) -> None:
    for form in FORMS:
        text = plan.to_csv(**form)
        assert Plan.from_csv(text, plan.placement) == plan
        assert Plan.from_csv(text.replace(",", " , ,"), plan.placement) == plan
        assert Plan.from_csv(text.replace("\n", "\r\n") + "\n\n", plan.placement) == plan


@given(plans(chains()))
@settings(max_examples=some(100))
def test_pytorch_takes_any_chain_that_keeps_all_ranks_busy(plan: Plan) -> None:
    """Its own adding of communication takes no idle rank, its validator no forwards only."""
    assume(all(plan.orders) and len(plan.placement.tasks) > plan.num_stages)
    home = dict(enumerate(plan.placement.ranks_of(stage)[0] for stage in plan.placement.stages))
    for form in FORMS:
        lines = plan.to_csv(**form).splitlines()
        actions = {rank: [theirs._Action.from_str(cell) for cell in line.split(",")] for rank, line in enumerate(lines)}
        assert theirs._validate_schedule(actions, plan.num_ranks, plan.num_stages, plan.num_microbatches) == home
        if not form["communication"]:
            actions = theirs._add_send_recv(actions, home.get, plan.num_stages)
        simulates(
            SimpleNamespace(pipeline_order_with_comms=actions, stage_index_to_group_rank=home, _num_stages=len(home))
        )


@given(plans(chains()), st.randoms(use_true_random=False))
@settings(max_examples=some(200))
def test_no_message_may_be_missing_or_there_twice_or_elsewhere(plan: Plan, chooser: random.Random) -> None:
    lines = [line.split(",") for line in plan.to_csv(communication=True).splitlines()]
    messages = [
        (r, i) for r, line in enumerate(lines) for i, cell in enumerate(line) if "SEND" in cell or "RECV" in cell
    ]
    if not messages:
        return
    home, at = chooser.choice(messages)
    cell = lines[home].pop(at)
    early, late = [cell, *lines[home]], [*lines[home], cell]
    twice = [*lines[home][:at], cell, cell, *lines[home][at:]]
    wrong = {home: [lines[home], early if "SEND" in cell else late, twice]}
    wrong |= {rank: [[*line, cell]] for rank, line in enumerate(lines) if rank != home}
    for rank, changes in wrong.items():
        for line in changes:
            text = "\n".join(",".join(line if r == rank else lines[r]) for r in range(len(lines)))
            with pytest.raises(FormatError):
                Plan.from_csv(text, plan.placement)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0F0,0SEND_F0\n1F0", "line 1, cell 2: 0SEND_F0 has no 1RECV_F0; put it into line 2"),
        ("0F0\n1RECV_F0,1F0", "line 2, cell 1: 1RECV_F0 has no 0SEND_F0; put it into line 1"),
        ("0SEND_F0,0F0\n1RECV_F0,1F0", "line 1, cell 1: 0SEND_F0 sends what is not made yet; put it after 0F0"),
        ("0F0,0SEND_F0,0RECV_B0\n1RECV_F0,1F0,1SEND_B0,1I0", "cell 3: 1SEND_B0 sends what is not made yet; put it"),
        ("0F0,0SEND_F0\n1F0,1RECV_F0", "line 2, cell 1: 1F0 runs before its input has arrived; put 1RECV_F0 before it"),
        ("0F0,0SEND_F0,,0B0\n1RECV_F0,1F0,1B0", "cell 4: 0B0 runs before its input has arrived; put 0RECV_B0"),
        ("0F0,1RECV_F0\n0SEND_F0,1F0", "line 1, cell 2: 1RECV_F0 is on rank 0, but stage 1 runs on rank 1; move it"),
        ("0F0,0SEND_F0\n1RECV_F0,1F0,0F1", "cell 3: 0F1 is on rank 1, but stage 0 runs on rank 0; move it to line 1"),
        ("0F0,1F0,0SEND_F0,1RECV_F0", "line 1, cell 3: 0SEND_F0 stays on rank 0, where stage 1 is too; remove it"),
        ("0F0,0SEND_F0\n1RECV_F0,1F0,1SEND_F0", "line 2, cell 3: 1SEND_F0 has no stage 2 at its other end; remove it"),
        ("0F0,3SEND_F0", "line 1, cell 2: 3SEND_F0 belongs to stage 3, which no line runs; remove it"),
        ("0F0,0SEND_F0\n2F0", "the CSV never runs stage 1, but runs stage 2; stages count from 0"),
        ("0F0,0SEND_X0", "line 1, cell 2: '0SEND_X0' is not an op"),
        ("0F0\n(0F1;0SEND_F0)OVERLAP_F_B", "line 2, cell 1: '0SEND_F0' is not an op"),
    ],
)
def test_a_wrong_cell_is_told(text: str, told: str) -> None:
    with pytest.raises(FormatError, match=re.escape(told)):
        Plan.from_csv(text, place(Costs.uniform(2), Cluster.uniform(2)))


def test_blanks_and_what_pytorch_does_for_itself_say_nothing() -> None:
    placement = place(Costs.uniform(1), Cluster.uniform(1))
    told = Plan.from_csv("0UNSHARD, 0F0 ,,0B0,0REDUCE_GRAD,0RESHARD,0UNSHARD3", placement)
    assert told.to_csv() == "0F0,0B0\n"


def test_b_is_i_and_w_where_the_placement_splits_it() -> None:
    text = PLAN.to_csv(communication=True)
    split = place(Costs.uniform(3, weight_us=1), Cluster.uniform(3))
    assert Plan.from_csv(text, split).to_csv() == one_f_one_b(split, 4).to_csv()
    with pytest.raises(PlanError, match=r"rank 0 does 0B0, which the placement does not know \(stage 0 has F\)"):
        check(Plan.from_csv(text, PLAN.placement.forward_only()))


@pytest.mark.parametrize(
    ("placement", "told"),
    [
        (place(Costs.uniform(2, recompute_us=1), Cluster.uniform(2)), "cannot express 0R: plan without recompute"),
        (place(Costs.uniform(2), Cluster.uniform(3), [0, (1, 2)]), "stage 1 is on ranks 1, 2: place it on one"),
        (
            place(Costs.uniform(3, edges=((0, 1), (1, 2), (0, 2))), Cluster.uniform(3)),
            "is for a chain, but this one also has 0F -> 2F",
        ),
        (place(Costs.uniform(3, edges=((0, 1),)), Cluster.uniform(3)), "is for a chain, but this one lacks 1F -> 2F"),
        (bidirectional(Costs.uniform(2), Cluster.uniform(2)), "but this one lacks 1F -> 2F"),
        (
            Placement((Task(0, Kind.F, (0,), 1), Task(2, Kind.F, (0,), 1)), (Edge(0, 1),), Cluster.uniform(1)),
            "but stage 1 has no task",
        ),
        (
            Placement((Task(0, Kind.F, (0,), 1), Task(0, Kind.W, (0,), 1)), (), Cluster.uniform(1)),
            "but stage 0 has F W: number and split them like that, or keep the plan by to_json",
        ),
    ],
)
def test_what_it_cannot_say_is_refused(placement: Placement, told: str) -> None:
    plan = gpipe(placement, 2)
    for form in FORMS:
        with pytest.raises(ScheduleError, match=re.escape(told)):
            plan.to_csv(**form)


def test_communication_of_a_chain_does_not_fit_another_shape() -> None:
    text = PLAN.to_csv(communication=True)
    skip = place(Costs.uniform(3, edges=((0, 1), (1, 2), (0, 2))), Cluster.uniform(3))
    assert Plan.from_csv(PLAN.to_csv(), skip).orders == PLAN.orders
    with pytest.raises(ScheduleError, match="also has 0F -> 2F"):
        Plan.from_csv(text, skip)
