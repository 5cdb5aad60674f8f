"""A rank's program: the plan's order, and how often each value is used."""

from __future__ import annotations

from rota.cluster import Cluster
from rota.costs import Costs
from rota.placing import place
from rota.plan import Plan
from rota.programs.actions import Program, compile_program
from rota.schedules import gpipe
from rota.tasks import Op
from support.random_plans import Edges, random_plan, with_random_wires


def programs(edges: Edges, plan: Plan) -> list[Program]:
    index = {edge: i for i, edge in enumerate(edges)}
    return [compile_program(plan, index, rank) for rank in range(plan.num_ranks)]


def many_programs() -> list[tuple[Plan, list[Program]]]:
    drawn = [random_plan(seed, num_ranks) for seed in range(100) for num_ranks in (2, 4)]
    drawn += [(edges, with_random_wires(plan, seed)) for seed, (edges, plan) in enumerate(drawn[:60])]
    return [(plan, programs(edges, plan)) for edges, plan in drawn]


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
