"""Plans and stages that do not fit together are refused."""

from dataclasses import replace

import pytest
from torch import nn

from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.errors import PipelineError
from rota.core.placement import Placement
from rota.core.placing import bidirectional, place
from rota.core.plan import Plan, Usage
from rota.core.tasks import Kind, Op
from rota.models import Stages, split
from rota.runtime.plans import refuse_other_cuts, refuse_unsupported
from rota.schedules import forward_only, gpipe
from support.networks import plan_for
from support.random_plans import random_plan

CHAIN = [(0, 1), (1, 2)]


def with_task(changed: str, kind: Kind) -> Plan:
    """The chain, with one more task beside one of its own."""
    placement = plan_for(3).placement
    task = next(task for task in placement.tasks if str(task) == changed)
    return Plan(replace(placement, tasks=(*placement.tasks, replace(task, kind=kind))), 1, ((), (), ()))


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


def joined_by(*edges: tuple[int, int]) -> Plan:
    return gpipe(place(Costs.uniform(3), Cluster.uniform(3), edges=[*edges]), 2)


def backward_elsewhere() -> Plan:
    placement = plan_for(3).placement
    tasks = tuple(replace(t, ranks=(0,)) if str(t) == "2B" else t for t in placement.tasks)
    orders = [["0F0", "2B0", "0B0"], ["1F0", "1B0"], ["2F0"]]
    return Plan(Placement(tasks, placement.edges, placement.cluster), 1, tuple(tuple(map(Op.parse, o)) for o in orders))


def backward_on_fewer() -> Plan:
    placement = place(Costs.uniform(3), Cluster.uniform(3), [(0, 1), 1, 2])
    tasks = tuple(replace(t, ranks=(0,)) if str(t) == "0B" else t for t in placement.tasks)
    return Plan(Placement(tasks, placement.edges, placement.cluster), 1, ((), (), ()))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            with_task("0B", Kind.W),
            "stage 0 has F B W tasks; a stage that trains has F, R if it recomputes, and B or both",
        ),
        (with_task("1B", Kind.I), "stage 1 has F B I tasks"),
        (forward_alone(), "stage 0 has F tasks; .* in one plan either all stages train or none"),
        (recomputed_late(), "lacks the edge 1R → 1B"),
        (joined_by((0, 1)), "lacks the edge 1F → 2F; measure the stages"),
        (plan_for(2), r"the plan has 2 stages, the model was split into 3; split\(model, 2\), or plan for 3 stages"),
        (joined_by((0, 1), (0, 2)), "lacks the edge 1F → 2F; measure the stages"),
        (joined_by(*CHAIN, (0, 2)), "has, unlike the model, the edge 0F → 2F; measure the stages"),
        (joined_by(*CHAIN, (1, 2)), "has an edge twice"),
        (backward_elsewhere(), "task 2B is on rank 0, but stage 2's other task on rank 2; place a stage's forward"),
        (backward_on_fewer(), "task 0B is on rank 0, but stage 0's other task on rank 0, 1; place a stage's forward"),
    ],
)
def test_refused(plan: Plan, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        refuse_unsupported(plan, CHAIN, 3)


def test_what_is_supported_is_not_refused() -> None:
    for plan in (plan_for(3), plan_for(3, "gpipe"), forward_only(plan_for(3).placement.forward_only(), 3)):
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
    plan = plan_for(2)
    planned = replace(plan, usage=Usage(("3",), 1))
    refuse_other_cuts(split(model, 2, planned.cuts), planned)
    refuse_other_cuts(Stages([model[:2], model[2:]]), planned)  # by hand: nobody knows
    refuse_other_cuts(split(model, 2), plan)
    with pytest.raises(PipelineError, match=r"cut at 2, but the plan is for 3: rota\.split"):
        refuse_other_cuts(split(model, 2), planned)
