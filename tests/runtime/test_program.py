"""A rank's program: the plan's order, and what cannot be run refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from rota.costs import Cluster, Costs
from rota.errors import PipelineError
from rota.models import Stages, split
from rota.placement import Placement
from rota.placing import bidirectional, place
from rota.plan import Plan
from rota.runtime.program import Program, compile_program, refuse_other_cuts, refuse_unsupported
from rota.schedules import forward_only, gpipe, one_f_one_b
from rota.tasks import Kind, Op
from rota.usage import Usage
from support.random_plans import Edges, random_plan

CHAIN = [(0, 1), (1, 2)]


def programs(edges: Edges, plan: Plan) -> list[Program]:
    index = {edge: i for i, edge in enumerate(edges)}
    return [compile_program(plan, index, rank) for rank in range(plan.num_ranks)]


def many_programs() -> list[tuple[Plan, list[Program]]]:
    drawn = [random_plan(seed, num_ranks) for seed in range(100) for num_ranks in (2, 4)]
    return [(plan, programs(edges, plan)) for edges, plan in drawn]


def chain_plan(schedule: object = one_f_one_b) -> Plan:
    return schedule(place(Costs.uniform(3), Cluster.uniform(3)), 4)  # type: ignore[operator]


def test_actions_keep_the_wire_order() -> None:
    for plan, of_ranks in many_programs():
        for program in of_ranks:
            here = [
                action
                for action in plan.wire_order
                if (isinstance(action, Op) and action in plan.orders[program.rank])
                or (not isinstance(action, Op) and program.rank in (action.sender, action.receiver))
            ]
            done = [action.message.transfer if action.message else action.op for action in program.actions]
            assert done == here


def test_values_and_columns_are_told_apart() -> None:
    for plan, of_ranks in many_programs():
        for program in of_ranks:
            messages = [action.message for action in program.actions if action.message]
            assert len({(message.value, message.transfer.receiver) for message in messages}) == len(messages)
            received = {a.message.value for a in program.actions if a.what == "receive" and a.message}
            assert program.arriving == received
        columns = [a.message.column for p in of_ranks for a in p.actions if a.what == "send" and a.message]
        routes = plan.placement.routes
        assert sorted(columns) == [(r, k) for r in range(len(routes)) for k in range(plan.num_microbatches)]
        for program in of_ranks:
            for message in (action.message for action in program.actions if action.message):
                route = routes[message.column[0]]
                assert (route.sender, route.receiver) == message.transfer[2:4]
                assert message.column[1] == message.transfer.source.microbatch


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


# --- what is refused --------------------------------------------------------------------------------------------------


def with_task(changed: str, kind: Kind) -> Plan:
    """The chain, with one more task of stage 0."""
    placement = chain_plan().placement
    task = next(task for task in placement.tasks if str(task) == changed)
    return Plan(replace(placement, tasks=(*placement.tasks, replace(task, kind=kind))), 1, ((), (), ()))


def weights_alone() -> Plan:
    return with_task("0B", Kind.W)


def backward_and_inputs() -> Plan:
    return with_task("1B", Kind.I)


def forward_alone() -> Plan:
    """A stage that does not train, in a plan that does."""
    placement = place(Costs.uniform(3), Cluster.uniform(3))
    tasks = tuple(task for task in placement.tasks if str(task) != "0B")
    return Plan(Placement(tasks, (), placement.cluster), 1, ((), (), ()))


def recomputed_late() -> Plan:
    """R that the backward does not wait for."""
    placement = place(Costs.uniform(3, recompute_us=1), Cluster.uniform(3))
    names = [(str(placement.tasks[edge.source]), str(placement.tasks[edge.target])) for edge in placement.edges]
    edges = tuple(edge for edge, name in zip(placement.edges, names, strict=True) if name != ("1R", "1B"))
    return Plan(replace(placement, edges=edges), 1, ((), (), ()))


def two_streams() -> Plan:
    return gpipe(place(Costs.uniform(3), Cluster.uniform(3), edges=[(0, 1)]), 2)


def two_stages() -> Plan:
    return gpipe(place(Costs.uniform(2), Cluster.uniform(3), [0, 1]), 2)


def without_edge() -> Plan:
    return gpipe(place(Costs.uniform(3), Cluster.uniform(3), edges=[(0, 1), (0, 2)]), 2)


def with_edge() -> Plan:
    return gpipe(place(Costs.uniform(3), Cluster.uniform(3), edges=[*CHAIN, (0, 2)]), 2)


def edge_twice() -> Plan:
    return gpipe(place(Costs.uniform(3), Cluster.uniform(3), edges=[*CHAIN, (1, 2)]), 2)


def backward_elsewhere() -> Plan:
    placement = chain_plan().placement
    tasks = tuple(replace(t, ranks=(0,)) if str(t) == "2B" else t for t in placement.tasks)
    orders = [["0F0", "2B0", "0B0"], ["1F0", "1B0"], ["2F0"]]
    return Plan(Placement(tasks, placement.edges, placement.cluster), 1, tuple(tuple(map(Op.parse, o)) for o in orders))


def backward_on_fewer() -> Plan:
    placement = place(Costs.uniform(3), Cluster.uniform(3), [(0, 1), 1, 2])
    tasks = tuple(replace(t, ranks=(0,)) if str(t) == "0B" else t for t in placement.tasks)
    return Plan(Placement(tasks, placement.edges, placement.cluster), 1, ((), (), ()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            weights_alone,
            "stage 0 has F B W tasks; a stage that trains has F, R if it recomputes, and B or both",
        ),
        (backward_and_inputs, "stage 1 has F B I tasks"),
        (forward_alone, "stage 0 has F tasks; .* in one plan either all stages train or none"),
        (recomputed_late, "lacks the edge 1R → 1B"),
        (two_streams, "lacks the edge 1F → 2F; measure the stages"),
        (two_stages, r"the plan has 2 stages, the model was split into 3; split\(model, 2\), or plan for 3 stages"),
        (without_edge, "lacks the edge 1F → 2F; measure the stages"),
        (with_edge, "has, unlike the model, the edge 0F → 2F; measure the stages"),
        (edge_twice, "has an edge twice"),
        (backward_elsewhere, "task 2B is on rank 0, but stage 2's other task on rank 2; place a stage's forward"),
        (backward_on_fewer, "task 0B is on rank 0, but stage 0's other task on rank 0, 1; place a stage's forward"),
    ],
)
def test_refused(make: object, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        refuse_unsupported(make(), CHAIN, 3)  # type: ignore[operator]


def test_what_is_supported_is_not_refused() -> None:
    for plan in (chain_plan(), chain_plan(gpipe), forward_only(chain_plan().placement.forward_only(), 3)):
        refuse_unsupported(plan, CHAIN, 3)
    for more in ({"weight_us": 1}, {"recompute_us": (1, None, 2)}, {"weight_us": 1, "recompute_us": 1}):
        refuse_unsupported(gpipe(place(Costs.uniform(3, **more), Cluster.uniform(3)), 2), CHAIN, 3)
    for on in ([0, (1, 2), 3], [(0, 1), (2, 3), (0, 1, 2, 3)]):
        refuse_unsupported(gpipe(place(Costs.uniform(3), Cluster.uniform(4), on), 2), CHAIN, 3)
    both = bidirectional(Costs.uniform(2), Cluster.uniform(2))
    refuse_unsupported(gpipe(both, 2), [(0, 1), (2, 3)], 4)
    for seed in range(50):
        edges, plan = random_plan(seed, 3)
        refuse_unsupported(plan, edges, plan.num_stages)


def test_a_plan_for_other_cuts_is_refused() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    plan = one_f_one_b(place(Costs.uniform(2), Cluster.uniform(2)), 2)
    planned = replace(plan, usage=Usage(("3",), 1))
    refuse_other_cuts(split(model, 2, planned.cuts), planned)
    refuse_other_cuts(Stages([model[:2], model[2:]]), planned)  # by hand: nobody knows
    refuse_other_cuts(split(model, 2), plan)
    with pytest.raises(PipelineError, match=r"cut at 2, but the plan is for 3: rota\.split"):
        refuse_other_cuts(split(model, 2), planned)
