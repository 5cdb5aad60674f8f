"""A plan is for micro-batches of some size: a step with others says so, once, and so does what compares them."""

import io
from contextlib import redirect_stderr
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rota import Cluster, Costs, Pipeline, PlacementError, Plan, Timeline, compare, place
from rota.calibration.placement_costs import costs_of
from rota.core.plan import Usage
from rota.schedules import forward_only, one_f_one_b
from support.networks import WIDTH, chain, loss_fn
from support.pool import Pool
from support.profiles import profile


def plan_for(rows: int | None, usage: Usage | None = None) -> Plan:
    plan = one_f_one_b(place(Costs.uniform(3, microbatch_rows=rows), Cluster.uniform(3)), 4)
    return replace(plan, usage=usage)


def batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.ones(rows, WIDTH).double(), torch.ones(rows, WIDTH).double()


def steps(rank: int, plan: Plan, batches: list[Any]) -> tuple[str, Timeline]:
    told = io.StringIO()
    with redirect_stderr(told), Pipeline(chain(3), plan, loss_fn) as pipeline:
        for inputs, targets in batches:
            pipeline.step(inputs, targets)
        return told.getvalue(), pipeline.timeline()


RAGGED = [*batch(16)[0].split([3, 5, 4, 4])], [*batch(16)[1].split([3, 5, 4, 4])]
MOSTLY_LARGER = [*batch(22)[0].split([6, 6, 4, 6])], [*batch(22)[1].split([6, 6, 4, 6])]
LARGER = [*batch(22)[0].split([6, 6, 5, 5])], [*batch(22)[1].split([6, 6, 5, 5])]
CASES: dict[str, tuple[Plan, list[Any], str]] = {
    "as planned": (plan_for(5), [batch(20), batch(40)], ""),
    "others": (plan_for(5), [batch(40)] * 2, "for micro-batches of 5 rows, but this step's have up to 10, so"),
    "by autoplan": (
        plan_for(None, Usage(("a", "b"), 5)),
        [batch(8)],
        "for micro-batches of 5 rows, but this step's have up to 2",
    ),
    "one is as planned": (plan_for(4), [MOSTLY_LARGER], "of 4 rows, but this step's have up to 6, so"),
    "none is as planned": (plan_for(4), [LARGER], "for micro-batches of 4 rows, but this step's have up to 6, so"),
}


@pytest.mark.parametrize("case", CASES)
def test_other_rows_are_told_once_by_the_rank_that_reads_them(pool: Pool, case: str) -> None:
    plan, batches, words = CASES[case]
    for rank, (told, _) in enumerate(pool.run(3, steps, plan, batches)):
        if rank == 0 and words:
            assert words in told
            assert told.count("\n") == 1
            assert f"give {4 * (plan.microbatch_rows or 0)} rows per step, or profile with micro-batches of" in told
        else:
            assert told == ""


def test_what_compares_tells_them(pool: Pool) -> None:
    words = "The plan is for micro-batches of 5 rows, but those measured have 10: profile with 10 rows and plan again"
    for plan in (plan_for(5), plan_for(None, Usage(("a", "b"), 5))):
        for _, timeline in pool.run(3, steps, plan, [batch(40)]):
            again = Timeline.from_json(timeline.to_json())
            assert (again.plan.microbatch_rows, plan.microbatch_rows) == (10, 5)
            assert compare(plan, again).to_text().startswith(words)
    for rows, given in ((5, batch(20)), (None, batch(40)), (4, RAGGED)):
        (_, timeline), *_ = pool.run(3, steps, plan_for(rows), [given])
        assert "micro-batches of" not in compare(plan_for(rows), timeline).to_text()


def inference(rank: int, plan: Plan) -> str:
    told = io.StringIO()
    with redirect_stderr(told), Pipeline(chain(3), plan, loss_fn) as pipeline:
        pipeline.evaluate(*batch(8))
        pipeline.forward(batch(8)[0])
    return told.getvalue()


def test_only_a_plan_of_forwards_is_for_evaluation(pool: Pool) -> None:
    forwards = forward_only(plan_for(5).placement.forward_only(), 4)
    assert [told.count("this step's have up to 2") for told in pool.run(3, inference, forwards)] == [1, 0, 0]
    assert pool.run(3, inference, plan_for(5)) == [""] * 3


@pytest.mark.dist
def test_costs_and_plans_keep_them() -> None:
    costs = profile(chain(2), *batch(6), loss_fn, repeats=1)
    assert costs.microbatch_rows == 6
    assert Costs.from_json(costs.to_json()) == costs
    plan = one_f_one_b(place(costs, Cluster.uniform(2)), 2)
    again = Plan.from_json(plan.to_json())
    assert (again, again.microbatch_rows) == (plan, 6)
    assert plan.placement.forward_only().microbatch_rows == costs_of(plan.placement).microbatch_rows == 6


@pytest.mark.parametrize("value", [0, -1, "8", 2.5])
def test_wrong_rows(value: Any) -> None:
    with pytest.raises(PlacementError, match="microbatch_rows is"):
        Costs.uniform(2, microbatch_rows=value)
