"""What must not run is not started: every rank says so, and none waits for another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rota import (
    Cluster,
    Costs,
    Op,
    Pipeline,
    PipelineError,
    PlanError,
    RotaError,
    SplitError,
    Stages,
    bidirectional,
    place,
)
from rota.plan import Plan
from rota.schedules import gpipe, one_f_one_b
from support.fresh import run_fresh
from support.networks import (
    StepResult,
    assert_equal_steps,
    batch_of,
    chain,
    graph_of_layers,
    loss_fn,
    pipeline_steps,
    serial_step,
)
from support.pool import Pool

pytestmark = pytest.mark.dist

NUM_RANKS = 3


def plan_for(num_ranks: int = NUM_RANKS, num_microbatches: int = 4, limit_bytes: int | None = None) -> Plan:
    return one_f_one_b(place(Costs.uniform(num_ranks), Cluster.uniform(num_ranks, limit_bytes)), num_microbatches)


def with_orders(change: Callable[[list[list[Op]]], Any]) -> Plan:
    plan = plan_for()
    orders = [list(order) for order in plan.orders]
    change(orders)
    return Plan(plan.placement, plan.num_microbatches, tuple(map(tuple, orders)))


def swap_first_and_last(orders: list[list[Op]]) -> None:
    orders[1][0], orders[1][-1] = orders[1][-1], orders[1][0]


REFUSED: dict[str, Plan] = {
    "missing": with_orders(lambda orders: orders[1].pop()),
    "duplicate": with_orders(lambda orders: orders[2].append(orders[2][0])),
    "wrong rank": with_orders(lambda orders: orders[0].append(orders[1].pop())),
    "unknown": with_orders(lambda orders: orders[0].append(Op.parse("7F0"))),
    "cycle": with_orders(swap_first_and_last),
    "memory": plan_for(limit_bytes=2),
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
    cases = [(chain(3), plan) for plan in REFUSED.values()] + [(chain(3), plan_for(4)), (chain(4), plan_for())]
    batch = batch_of(4)
    results = pool.run(NUM_RANKS, refuse_then_run, cases, chain(3), plan_for(), batch)
    for told, _ in results:
        assert all(text.startswith("PlanError: ") for text in told[: len(REFUSED)])
        assert "the plan has 4 stages, the model was split into 3" in told[-2]
        assert "the plan has 3 stages, the model was split into 4" in told[-1]
        assert told == results[0][0]
    steps: list[StepResult] = [steps[0] for _, steps in results]
    assert_equal_steps(steps, serial_step(chain(3), *batch))


def other_plan_on(rank: int, odd_rank: int, plan: Plan, odd_plan: Plan) -> str:
    (told,) = try_each(rank, [(chain(plan.num_stages), odd_plan if rank == odd_rank else plan)])
    return told


OTHER_PLANS = {
    "order": gpipe(plan_for().placement, 4),
    "number of micro-batches": plan_for(num_microbatches=5),
    "times alone": one_f_one_b(place(Costs.uniform(NUM_RANKS, 7), Cluster.uniform(NUM_RANKS)), 4),
    "number of ranks": one_f_one_b(place(Costs.uniform(NUM_RANKS), Cluster.uniform(4), [0, 1, 3]), 4),
}


@pytest.mark.parametrize(("other", "odd_rank"), [*zip(OTHER_PLANS, (0, 1, 2, 1), strict=True)])
def test_another_plan_on_one_rank_is_told_on_all(pool: Pool, other: str, odd_rank: int) -> None:
    for told in pool.run(NUM_RANKS, other_plan_on, odd_rank, plan_for(), OTHER_PLANS[other]):
        assert told.startswith("PipelineError: rank "), told
        assert "has a different plan from rank 0; give all ranks the same plan" in told


def other_stages_on(rank: int, odd_rank: int, plan: Plan) -> str:
    """There the last stage reads the step's inputs, beside what comes from the stage before it."""
    layers = chain(plan.num_stages).modules
    odd = Stages(layers, inputs={0: 0, plan.num_stages - 1: 0})
    (told,) = try_each(rank, [(odd if rank == odd_rank else Stages(layers), plan)])
    return told


def test_stages_joined_otherwise_on_one_rank_are_told_on_all(pool: Pool) -> None:
    for told in pool.run(NUM_RANKS, other_stages_on, 1, plan_for()):
        assert "PipelineError: rank 1 has a different graph of stages from rank 0; give all ranks the same" in told


def test_other_number_of_processes(pool: Pool) -> None:
    for num_ranks in (2, 4):
        for told in pool.run(num_ranks, try_each, [(chain(3), plan_for())]):
            assert f"PipelineError: the plan is for 3 ranks, but {num_ranks} processes were started" in told[0]
            assert f"start 3, or plan for {num_ranks}" in told[0]


def test_without_processes_it_is_told_how_to_start_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(PipelineError, match=r"no process group: start the script with `rota run .* or torchrun"):
        Pipeline(chain(3), plan_for(), loss_fn)


def test_loss_fn_is_needed_where_there_are_backwards() -> None:
    with pytest.raises(PipelineError, match="the plan has backwards, so a loss_fn"):
        Pipeline(chain(3), plan_for(), None)


def test_two_final_stages() -> None:
    edges = [(0, 1), (0, 2)]
    plan = gpipe(place(Costs.uniform(3, edges=edges), Cluster.uniform(3)), 2)
    with pytest.raises(SplitError, match="stages 1, 2 send their output nowhere"):
        Pipeline(graph_of_layers(3, edges), plan, loss_fn)


def test_stages_of_both_streams() -> None:
    plan = gpipe(bidirectional(Costs.uniform(2), Cluster.uniform(2)), 2)
    with pytest.raises(PipelineError, match=r"2 data streams of 2 stages each, .* split into 4; split\(model, 2\)"):
        Pipeline(chain(4), plan, loss_fn)


def test_refused_on_one_rank_alone_ends_the_others(tmp_path: Path) -> None:
    """A script ends there, and the others are not left waiting."""
    ended = run_fresh(tmp_path, NUM_RANKS, make, plan_for(), REFUSED["cycle"])
    assert "PlanError: the orders wait in a cycle" in ended[1].last_line
    for rank in (0, 2):
        assert ended[rank].exit_code == 1, ended
        assert "LostRankError: lost a rank while" in ended[rank].last_line


def make(rank: int, plan: Plan, odd_plan: Plan) -> None:
    Pipeline(chain(3), odd_plan if rank == 1 else plan, loss_fn).close()
