"""What must not run is not started: every rank says so, and none waits for another."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rota
from rota import (
    Cluster,
    Costs,
    Kind,
    Op,
    Pipeline,
    PipelineError,
    Placement,
    Plan,
    PlanError,
    RotaError,
    SplitError,
    Stages,
    bidirectional,
    place,
    split,
)
from rota.core.plan import Usage
from rota.runtime.plans import refuse_other_cuts, refuse_unsupported
from rota.schedules import forward_only, gpipe, one_f_one_b, zb_h1
from support.fresh import run_fresh
from support.networks import (
    StepResult,
    assert_equal_steps,
    batch_of,
    chain,
    clear,
    cleared_step,
    graph_of_layers,
    loss_fn,
    pipeline_steps,
    plan_for,
    refusal,
    serial_step,
)
from support.odd_stages import Calls
from support.pool import Pool, on_ranks
from support.random_plans import random_plan

NUM_RANKS = 3
PLAN = plan_for(NUM_RANKS)


def with_orders(change: Callable[[list[list[Op]]], Any]) -> Plan:
    orders = [list(order) for order in PLAN.orders]
    change(orders)
    return replace(PLAN, orders=tuple(map(tuple, orders)))


def swap_first_and_last(orders: list[list[Op]]) -> None:
    orders[1][0], orders[1][-1] = orders[1][-1], orders[1][0]


REFUSED: dict[str, Plan] = {
    "missing": with_orders(lambda orders: orders[1].pop()),
    "duplicate": with_orders(lambda orders: orders[2].append(orders[2][0])),
    "wrong rank": with_orders(lambda orders: orders[0].append(orders[1].pop())),
    "unknown": with_orders(lambda orders: orders[0].append(Op.parse("7F0"))),
    "cycle": with_orders(swap_first_and_last),
    "memory": one_f_one_b(place(Costs.uniform(NUM_RANKS), Cluster.uniform(NUM_RANKS, 2)), 4),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_plan_that_check_refuses_needs_no_other_process_to_be_refused(reason: str) -> None:
    assert not dist.is_initialized()
    with pytest.raises(PlanError) as error:
        Pipeline(chain(3), REFUSED[reason], loss_fn)
    assert error.value.reason == reason
    assert not dist.is_initialized()


def try_each(rank: int, cases: list[tuple[Stages, Plan]]) -> list[str]:
    """What the making of each pipeline raises; a word with all ranks after each shows that none is left behind."""
    told = []
    for stages, plan in cases:
        try:
            Pipeline(stages, plan, loss_fn)
            told.append("nothing")
        except RotaError as error:
            told.append(f"{type(error).__name__}: {error}")
        dist.barrier()
    return told


def refuse_then_run(rank: int, cases: list[tuple[Stages, Plan]], stages: Stages, plan: Plan, batch: Any) -> Any:
    return try_each(rank, cases), pipeline_steps(rank, stages, plan, [batch])


def test_every_rank_refuses_and_can_go_on(pool: Pool) -> None:
    cases = [(chain(3), plan) for plan in REFUSED.values()] + [(chain(3), plan_for(4)), (chain(4), PLAN)]
    batch = batch_of(4)
    results = pool.run(NUM_RANKS, refuse_then_run, cases, chain(3), PLAN, batch)
    for told, _ in results:
        assert all(text.startswith("PlanError: ") for text in told[: len(REFUSED)])
        assert "the plan has 4 stages, the model was split into 3" in told[-2]
        assert "the plan has 3 stages, the model was split into 4" in told[-1]
        assert told == results[0][0]
    steps: list[StepResult] = [steps[0] for _, steps in results]
    assert_equal_steps(steps, serial_step(chain(3), *batch))


OTHER_PLANS = {
    "order": gpipe(PLAN.placement, 4),
    "times alone": one_f_one_b(place(Costs.uniform(NUM_RANKS, 7), Cluster.uniform(NUM_RANKS)), 4),
    "number of ranks": one_f_one_b(place(Costs.uniform(NUM_RANKS), Cluster.uniform(4), [0, 1, 3]), 4),
}


@pytest.mark.parametrize(("other", "odd_rank"), [*zip(OTHER_PLANS, (0, 2, 1), strict=True)])
@on_ranks(NUM_RANKS)
def test_another_plan_on_one_rank_is_told_on_all(rank: int, other: str, odd_rank: int) -> None:
    (told,) = try_each(rank, [(chain(PLAN.num_stages), OTHER_PLANS[other] if rank == odd_rank else PLAN)])
    assert told.startswith("PipelineError: rank "), told
    assert "has a different plan from rank 0; give all ranks the same plan" in told


@on_ranks(NUM_RANKS)
def test_stages_joined_otherwise_on_one_rank_are_told_on_all(rank: int) -> None:
    """There the last stage reads the step's inputs, beside what comes from the stage before it."""
    layers = chain(PLAN.num_stages).modules
    odd = Stages(layers, inputs={0: 0, PLAN.num_stages - 1: 0})
    (told,) = try_each(rank, [(odd if rank == 1 else Stages(layers), PLAN)])
    assert "PipelineError: rank 1 has a different graph of stages from rank 0; give all ranks the same" in told


def test_other_number_of_processes(pool: Pool) -> None:
    for num_ranks in (2, 4):
        for told in pool.run(num_ranks, try_each, [(chain(3), PLAN)]):
            assert f"PipelineError: the plan is for 3 ranks, but {num_ranks} processes were started" in told[0]
            assert f"start 3, or plan for {num_ranks}" in told[0]


def test_without_processes_it_is_told_how_to_start_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(PipelineError, match=r"no process group: start the script with `rota run .* or torchrun"):
        Pipeline(chain(3), PLAN, loss_fn)


def test_loss_fn_is_needed_where_there_are_backwards() -> None:
    with pytest.raises(PipelineError, match="the plan has backwards, so a loss_fn"):
        Pipeline(chain(3), PLAN, None)


def test_two_final_stages() -> None:
    edges = [(0, 1), (0, 2)]
    plan = gpipe(place(Costs.uniform(3, edges=edges), Cluster.uniform(3)), 2)
    with pytest.raises(SplitError, match="stages 1, 2 send their output nowhere"):
        Pipeline(graph_of_layers(3, edges), plan, loss_fn)


def test_stages_of_both_streams() -> None:
    plan = gpipe(bidirectional(Costs.uniform(2), Cluster.uniform(2)), 2)
    with pytest.raises(PipelineError, match=r"2 data streams of 2 stages each, .* split into 4; split\(model, 2\)"):
        Pipeline(chain(4), plan, loss_fn)


@pytest.mark.dist
def test_refused_on_one_rank_alone_ends_the_others(tmp_path: Path) -> None:
    """A script ends there, and the others are not left waiting."""
    ended = run_fresh(tmp_path, NUM_RANKS, make, PLAN, REFUSED["cycle"])
    assert "PlanError: the orders wait in a cycle" in ended[1].last_line
    for rank in (0, 2):
        assert ended[rank].exit_code == 1, ended
        assert "LostRankError: lost a rank while" in ended[rank].last_line


def make(rank: int, plan: Plan, odd_plan: Plan) -> None:
    Pipeline(chain(3), odd_plan if rank == 1 else plan, loss_fn).close()


# --- all ranks make the same call: where they do not, all hear which, before anything has run -------------------------

BATCH = batch_of(4)
CALLS: dict[str, Callable[[Pipeline], Any]] = {
    "step()": lambda pipeline: pipeline.step(*BATCH),
    "step(sync=False)": lambda pipeline: pipeline.step(*BATCH, sync=False),
    "evaluate()": lambda pipeline: pipeline.evaluate(*BATCH),
    "forward()": lambda pipeline: pipeline.forward(BATCH[0]),
    "clip_grad_norm_()": lambda pipeline: pipeline.clip_grad_norm_(1.0),
    "timeline()": lambda pipeline: pipeline.timeline(),
}


def differing_calls(rank: int) -> tuple[list[str], bool, StepResult]:
    """Rank 1 makes another call than the others, in all combinations; then a step, as if nothing had happened."""
    told = []
    with Pipeline(chain(3), plan_for(3), loss_fn) as pipeline:
        pipeline.step(*BATCH)  # there is a timeline
        clear(pipeline)
        for name, call in CALLS.items():
            for other in CALLS:
                if other != name:
                    told.append(refusal(CALLS[other] if rank == 1 else call, pipeline))
        untouched = all(parameter.grad is None for parameter in pipeline.parameters())
        return told, untouched, cleared_step(pipeline, *BATCH)


def test_all_ranks_hear_of_different_calls_and_can_go_on(pool: Pool) -> None:
    results = pool.run(3, differing_calls)
    pairs = [(name, other) for name in CALLS for other in CALLS if other != name]
    for told, untouched, _ in results:
        for (name, other), words in zip(pairs, told, strict=True):
            assert words == (
                f"the ranks make different calls at once: rank 0, rank 2 call {name}; rank 1 calls {other}; make the "
                f"same calls in the same order on all ranks"
            )
        assert untouched
    assert_equal_steps([result for *_, result in results], serial_step(chain(3), *BATCH))


@on_ranks(4)
def test_ranks_of_a_pipeline_have_one_scale(rank: int) -> None:
    """Replicas may differ: it is how their batches are weighted."""
    told = []
    with Pipeline(chain(2), plan_for(2), loss_fn, mesh=rota.mesh(pp=2, dp=2), check_data="never") as pipeline:
        for scale in (0.5 if dist.get_rank() == 3 else 1.0, 1.0 if pipeline.replica else 0.5):
            try:
                pipeline.step(*BATCH, scale=scale)
                told.append("")
            except PipelineError as error:
                told.append(str(error))
    assert told == ["rank 0 of replica 1 gave step scale=1, rank 1 of replica 1 0.5; give all ranks the same", ""]


# --- values that a stage does not take, graphs that several micro-batches share ---------------------------------------


class Unpacked(nn.Module):
    """As `torch.distributed.pipelining` calls it."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b


class Recurrent(nn.Module):
    """Keeps its state with the graph that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.states = nn.GRUCell(4, 4), [torch.zeros(2, 4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.states = [self.cell(x, self.states[0])]
        return self.states[0]


def _refused(_: int, make: Callable[[], nn.Module], has_graph: bool, schedule: Callable[..., rota.Plan]) -> str:
    plan = schedule(rota.place(Costs.uniform(1, weight_us=1), Cluster.uniform(1)), 2)
    inputs = torch.randn(4, 4)
    inputs = nn.Linear(4, 4)(inputs).tanh() if has_graph else inputs
    with rota.Pipeline(Stages([make()]), plan, nn.functional.mse_loss) as pipeline:
        return refusal(pipeline.step, inputs, torch.randn(4, 4))


@pytest.mark.parametrize("schedule", [gpipe, zb_h1])
def test_graphs_that_micro_batches_share(pool: Pool, schedule: Callable[..., rota.Plan]) -> None:
    of_input = pool.run(1, _refused, partial(nn.Linear, 4, 4), True, schedule)[0]
    assert "goes backward through a graph a second time: give step detached tensors" in of_input
    of_state = pool.run(1, _refused, Recurrent, False, schedule)[0]
    assert "keep tensor.detach() where stage 0 keeps a tensor" in of_state


@on_ranks(1)
def test_a_tuple_is_one_argument(rank: int) -> None:
    plan = gpipe(rota.place(Costs.uniform(2), Cluster.uniform(1), [0, 0]), 2)
    stages = Stages([Calls(lambda s, x: (s.linear(x), x), linear=nn.Linear(4, 4)), Unpacked()])
    with pytest.raises(PipelineError, match="a tuple that a stage returns is one argument"):
        stages.run(torch.randn(4, 4))
    with rota.Pipeline(stages, plan, nn.functional.mse_loss) as pipeline:
        message = refusal(pipeline.step, torch.randn(4, 4), torch.randn(4, 4))
    assert "stage 1 (Unpacked) is called with what stage 0 returns, which its forward does not take" in message
    assert "missing a required argument: 'b'" in message
    assert "unpack it in the forward: a, b = values" in message


class Wrong(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return len(x, x)  # type: ignore[call-arg, no-any-return]


def test_other_errors_of_a_forward_stay_as_they_are() -> None:
    with pytest.raises(TypeError, match="takes exactly one argument"):
        Stages([Wrong()]).run(torch.ones(1))


# --- plans and stages that do not fit together are refused ------------------------------------------------------------


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
        (with_task("0B", Kind.W), "stage 0 has F B W tasks; a stage that trains has F, R if it recomputes, and B or"),
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
