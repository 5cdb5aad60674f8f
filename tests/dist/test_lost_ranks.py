"""An error on one rank is told there as it is; the others end too, and say whom they lost and what they waited for."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dist.fresh import Ended, run_fresh
from dist.networks import Layer, batch_of, loss_fn
from rota import Cluster, Costs, Pipeline, Plan, Stages, place
from rota.schedules import NAMED

NUM_RANKS = 3


class Breaks(Layer):
    """Raises in the forward or backward of one micro-batch (they come in order)."""

    def __init__(self, where: str, microbatch: int) -> None:
        super().__init__()
        self.where, self.left = where, microbatch

    def break_if_it_is_time(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise ValueError("broken on purpose")

    def forward(self, *values: Tensor) -> Tensor:
        if self.where == "forward":
            self.break_if_it_is_time()
        output = super().forward(*values)
        if self.where == "backward":
            output.register_hook(lambda _: self.break_if_it_is_time())
        return output


def plan_for(schedule: str = "1f1b", num_microbatches: int = 4) -> Plan:
    placement = place(Costs.uniform(NUM_RANKS, 10, 20), Cluster.uniform(NUM_RANKS))
    if schedule == "forward_only":
        placement = placement.forward_only()
    return NAMED[schedule](placement, num_microbatches)


def stages_with(stage: Layer, at: int) -> Stages:
    return Stages([(stage if number == at else Layer()).double() for number in range(NUM_RANKS)])


def steps(rank: int, stages: Stages, plan: Plan, num_steps: int, loss: Any = loss_fn) -> None:
    """The first thing that fails ends the process, as in a script."""
    with Pipeline(stages, plan, loss) as pipeline:
        for _ in range(num_steps):
            pipeline.step(*batch_of(plan.num_microbatches))


def assert_told(ended: Ended, error: str) -> None:
    """`error`: a pattern."""
    assert ended.exit_code == 1, ended
    assert ended.after_s < 30, ended
    assert re.search(error, ended.last_line), ended


@pytest.mark.parametrize(
    ("where", "microbatch", "told"),
    [
        # the others: by what they read of the lost rank, or by what they have for it, whichever they come to first
        ("forward", 2, {0: "(waiting for 1B1→0B1|sending 0F3→1F3)", 2: "(waiting for 1F2→2F2|sending 2B1→1B1)"}),
        ("forward", 4 + 2, {0: "(waiting for 1B1→0B1|sending 0F3→1F3)", 2: "(waiting for 1F2→2F2|sending 2B1→1B1)"}),
        ("backward", 1, {0: "(waiting for 1B1→0B1|sending 0F3→1F3)", 2: "(waiting for 1F3→2F3|sending 2B2→1B2)"}),
        ("backward", 4 + 3, {0: "waiting for 1B3→0B3"}),
    ],
)
def test_stage_that_raises(tmp_path: Path, where: str, microbatch: int, told: dict[int, str]) -> None:
    ended = run_fresh(tmp_path, NUM_RANKS, steps, stages_with(Breaks(where, microbatch), 1), plan_for(), 2)
    assert_told(ended[1], "^ValueError: broken on purpose")
    assert "break_if_it_is_time" in ended[1].stderr
    for rank in (0, 2):
        assert_told(ended[rank], "LostRankError: lost (a )?rank.* while .*: look there for the first error")
    for rank, doing in told.items():
        assert_told(ended[rank], f"LostRankError: lost rank 1 while {doing}:")


def test_error_passes_through_rank_after_rank(tmp_path: Path) -> None:
    ended = run_fresh(tmp_path, NUM_RANKS, steps, stages_with(Breaks("forward", 4), 2), plan_for(), 2)
    assert_told(ended[2], "ValueError: broken on purpose")
    assert_told(ended[1], "LostRankError: lost rank 2 while waiting for 2B0→1B0")
    assert_told(ended[0], "LostRankError: lost rank 1 while waiting for 1B0→0B0")


def broken_loss(output: Tensor, target: Tensor) -> Tensor:
    return output - target


def test_loss_fn_that_returns_no_number(tmp_path: Path) -> None:
    ended = run_fresh(tmp_path, NUM_RANKS, steps, stages_with(Layer(), 0), plan_for(), 1, broken_loss)
    assert_told(ended[2], r"PipelineError: loss_fn returned shape \[5, 6\]; it must return a tensor with one element")
    assert_told(ended[1], "LostRankError: lost rank 2 while waiting for 2B0→1B0")


def test_rank_that_only_sends_is_told_too(tmp_path: Path) -> None:
    ended = run_fresh(tmp_path, NUM_RANKS, steps, stages_with(Breaks("forward", 4 + 1), 1), plan_for("forward_only"), 2)
    assert_told(ended[1], "ValueError: broken on purpose")
    assert_told(ended[0], r"LostRankError: lost rank 1 while sending 0F(\d)→1F\1:")
    assert_told(ended[2], "LostRankError: lost rank 1 while waiting for 1F1→2F1:")


def test_rank_that_is_gone_between_two_steps(tmp_path: Path) -> None:
    ended = run_fresh(tmp_path, NUM_RANKS, step_and_go, stages_with(Layer(), 0), plan_for())
    assert ended[1].exit_code == 9
    for rank in (0, 2):
        assert_told(ended[rank], "LostRankError: lost a rank while waiting for the others to begin the step")


def step_and_go(rank: int, stages: Stages, plan: Plan) -> None:
    with Pipeline(stages, plan, loss_fn) as pipeline:
        pipeline.step(*batch_of(4))
        if rank == 1:
            os._exit(9)
        pipeline.step(*batch_of(4))


# --- shapes that depend on the data -----------------------------------------------------------------------------------


class KeepPositive(Layer):
    def forward(self, *values: Tensor) -> Tensor:
        output = super().forward(*values)
        return output[values[0].sum(1) > 0]


def mean_of_output(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def steps_of_other_data(rank: int, stages: Stages, plan: Plan) -> None:
    with Pipeline(stages, plan, mean_of_output) as pipeline:
        for seed in (1, 2):
            torch.manual_seed(seed)
            pipeline.step(torch.randn(20, 6, dtype=torch.float64), torch.zeros(4))


def test_shapes_that_depend_on_the_data_are_told_by_the_sender(tmp_path: Path) -> None:
    ended = run_fresh(tmp_path, NUM_RANKS, steps_of_other_data, stages_with(KeepPositive(), 1), plan_for())
    made = r"float64\[\d, 6\] with gradient"
    assert_told(ended[1], rf"PipelineError: 1F\d→2F\d: stage 1 made {made}, after {made} in an earlier step")
    assert "use Pipeline(…, dynamic_shapes=True)" in ended[1].last_line
    assert_told(ended[0], "LostRankError: lost rank 1 while")
    assert_told(ended[2], "LostRankError: lost rank 1 while waiting for 1F")
