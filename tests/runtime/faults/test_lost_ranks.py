"""An error on one rank is told there as it is; the others end too, and say whom they lost and what they were at.

What that is depends on when they notice. What the lost rank has sent is through when it goes, for it waits for that (a
second at most); from there a rank goes on until it waits for what was never sent, and may notice earlier, at each
message that it posts. In the first step a rank waits for the layouts of activations where it posts the receive; later
steps post receives two ops ahead. Each test lists all that can be told.
"""

import math
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rota import Cluster, Costs, Pipeline, PipelineError, Plan, Stages, place, spmd
from rota.core.errors import LostRankError, error_text
from rota.runtime import transport
from rota.schedules import gpipe
from support.faulty_stages import NUM_RANKS, Fails, break_on_purpose, plan_for, stages_with
from support.fresh import Ended, run_fresh
from support.networks import Layer, batch_of, loss_fn
from support.parallel_modules import GatheredLayer, ParallelLayer
from support.pool import on_ranks

pytestmark = pytest.mark.dist

LOSSES = "waiting for the other ranks' losses"


def steps(rank: int, stages: Stages, plan: Plan, num_steps: int, loss: Any = loss_fn) -> None:
    """The first thing that fails ends the process, as in a script."""
    with Pipeline(stages, plan, loss) as pipeline:
        for _ in range(num_steps):
            pipeline.step(*batch_of(plan.num_microbatches))


def assert_told(ended: Ended, error: str) -> None:
    """`error`: a pattern."""
    assert ended.exit_code == 1, ended
    assert re.search(error, ended.last_line), ended


def assert_lost(ended: Ended, whom: str, *doings: str, first: str = "rank 1: ValueError: broken on purpose") -> None:
    """It told one of `doings`, which are "waiting for" or "sending" a message, or what all do together.

    `first`: the first error that it told, "" of a rank that was gone before it could tell.
    """
    if ended.exit_code == 70 and first:  # the machine was too busy for it to notice by itself in time
        assert re.search(f"was ended because another rank failed: {first}", ended.last_line), ended
        return
    message = f"the first error was that of {first}" if first else "look there for the first error"
    assert_told(ended, f"LostRankError: lost {whom} while ({'|'.join(doings)}): {message}")


@pytest.mark.parametrize(
    ("where", "microbatch", "first", "last"),
    [
        (
            "forward",
            4 + 2,
            ["sending 0F3→1F3", "waiting for 1B[123]→0B[123]"],
            ["waiting for 1F2→2F2", "waiting for 1F3→2F3", "sending 2B1→1B1"],
        ),
        ("backward", 4 + 3, ["waiting for 1B3→0B3"], [LOSSES]),
    ],
)
def test_stage_that_raises(tmp_path: Path, where: str, microbatch: int, first: list[str], last: list[str]) -> None:
    """`first`, `last`: what the first and the last rank may tell."""
    ended = run_fresh(
        tmp_path, NUM_RANKS, steps, stages_with(Fails(break_on_purpose, where, microbatch), 1), plan_for(), 2
    )
    assert_told(ended[1], "^ValueError: broken on purpose")
    assert "break_on_purpose" in ended[1].stderr
    assert_lost(ended[0], "rank 1", *first)
    assert_lost(ended[2], "a rank" if last == [LOSSES] else "rank 1", *last)


@pytest.mark.parametrize(("then", "doing"), [("step", "waiting for the others to begin the step"), ("loss", LOSSES)])
def test_rank_that_is_gone_between_two_steps(tmp_path: Path, then: str, doing: str) -> None:
    """Or between what a step and other calls do together."""
    ended = run_fresh(tmp_path, NUM_RANKS, step_and_go, stages_with(Layer(), 0), plan_for(), then)
    assert ended[1].exit_code == 9
    for rank in (0, 2):
        assert_lost(ended[rank], "a rank", doing, first="")


def step_and_go(rank: int, stages: Stages, plan: Plan, then: str) -> None:
    """Rank 1 goes before it does what the others do `then`."""
    with Pipeline(stages, plan, loss_fn) as pipeline:
        if rank == 1 and then == "loss":
            pipeline._engine.step_results.finish = lambda *_, **__: os._exit(9)  # type: ignore[method-assign]
        pipeline.step(*batch_of(4))
        if rank == 1:
            os._exit(9)
        getattr(pipeline, then)(*batch_of(4) if then == "step" else ())


def sockets() -> int:
    """How many connections this process has."""
    files = (file for file in Path("/proc/self/fd").iterdir() if file.is_symlink())  # one was that of the folder
    return sum(os.readlink(file).startswith("socket:") for file in files)


def keep_the_error(rank: int, plan: Plan) -> None:
    """Rank 2 goes in the second step. Rank 1 then waits until it cannot even begin to send to it."""
    before = sockets()

    def wait_until_lost() -> None:
        with suppress(RuntimeError):
            while True:
                pipeline._engine.here.transport._backend.send([torch.ones(1)], 2, 1)
                time.sleep(0.01)

    act = (lambda: None, wait_until_lost, partial(os._exit, 9))[rank]
    pipeline = Pipeline(stages_with(Fails(act, "forward", 4 + (rank == 1)), rank), plan, loss_fn)
    pipeline.step(*batch_of(4))
    with pytest.raises(LostRankError) as error:
        pipeline.step(*batch_of(4))
    assert sockets() <= before, error.value  # both the pipeline and the traceback are at hand
    assert rank == 0 or "while sending 1F1→2F1" in str(error.value)


def test_an_error_that_is_kept_keeps_no_connection(tmp_path: Path) -> None:
    ended = run_fresh(tmp_path, NUM_RANKS, keep_the_error, plan_for())
    assert [process.exit_code for process in ended] == [0, 0, 9], ended


class BreaksInOnePart(nn.Module):
    def __init__(self, where: str, inner: nn.Module, group: spmd.Group) -> None:
        super().__init__()
        self.where, self.inner, self.group = where, inner, group

    def raise_on_the_second(self) -> None:
        if self.group is not None and self.group.rank() == 1:
            raise ValueError("broken on purpose")

    def forward(self, *values: Tensor) -> Tensor:
        if self.where == "forward":
            self.raise_on_the_second()
        output: Tensor = self.inner(*values)
        if self.where == "backward":
            output.register_hook(lambda _: self.raise_on_the_second())
        return output


@pytest.mark.parametrize(
    ("where", "kind", "doing"), [("forward", GatheredLayer, "gathering"), ("backward", ParallelLayer, "summing")]
)
def test_one_rank_of_a_stage(tmp_path: Path, where: str, kind: type[nn.Module], doing: str) -> None:
    costs = Costs.uniform(2, 10, 20)
    plan = gpipe(place(costs, Cluster.uniform(NUM_RANKS), [(2,), (0, 1)]), 2)
    ended = run_fresh(tmp_path, NUM_RANKS, step_with_parts, where, kind, plan)
    assert_told(ended[1], "^ValueError: broken on purpose")
    assert_lost(ended[0], "a rank", f"{doing} the TP shards of a stage on ranks 0, 1")
    earlier = ["sending 0F1→1F1"] if where == "forward" else []
    assert_lost(ended[2], "rank [01]", *earlier, "waiting for 1B0→0B0")


def step_with_parts(rank: int, where: str, kind: type[nn.Module], plan: Plan) -> None:
    group = spmd.group((0, 1))
    last = BreaksInOnePart(where, kind(0, group), group)
    steps(rank, Stages([Layer().double(), last]), plan, 1)


MEMORY = "OutOfMemoryError: tried to allocate 2 GiB"


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("tried to allocate 2 GiB")


@on_ranks(NUM_RANKS)
def test_no_call_follows_one_that_failed_on_a_rank_alone(rank: int) -> None:
    """In a script that catches all errors. The others, which wait for that rank in the middle of the step, learn of it.

    Without a time limit, only other ranks can end one.
    """
    message = []
    stages = stages_with(Fails(run_out_of_memory, "forward", 4 + 1), 1)  # in its second step
    with Pipeline(stages, plan_for(), loss_fn, timeout_s=math.inf) as pipeline:
        pipeline.step(*batch_of(4))
        for call in (pipeline.step, pipeline.step, pipeline.evaluate):
            message.append(error_of(call, *batch_of(4)))
        message.append(error_of(pipeline.clip_grad_norm_, 1.0))
        message.append(error_of(pipeline.timeline))
        with pytest.raises(PipelineError, match="an earlier call failed"), pipeline.watching("metrics"):
            pass
    first, *later = message
    lost = f"LostRankError: lost rank 1 while .+: the first error was that of rank 1: {MEMORY}"
    assert first == MEMORY if rank == 1 else re.fullmatch(lost, first)
    for message in later:
        assert message.startswith(f"PipelineError: an earlier call failed on this rank ({first}), which ended")
        assert message.endswith("start all ranks again from a checkpoint (rota run --max-restarts does so)")


def error_of(call: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - its text is what is asserted
        call(*arguments)
    return error_text(caught.value)


@on_ranks(NUM_RANKS)
def test_calls_follow_one_that_was_refused_on_all_ranks(rank: int) -> None:
    """What all ranks refuse together ends nothing."""
    losses = []
    plan = plan_for()
    with Pipeline(stages_with(Layer(), 0), plan, loss_fn, check_data="never") as pipeline:
        for refused in (lambda: pipeline.step(*batch_of(4), scale=1.0 + rank), lambda: pipeline.step(*nan_batch())):
            with pytest.raises(PipelineError):
                refused()
            losses.append(pipeline.step(*batch_of(4)))
    assert losses[0] == losses[1]


def nan_batch() -> tuple[Tensor, Tensor]:
    inputs, targets = batch_of(4)
    return inputs, targets * math.nan


@pytest.mark.parametrize(
    ("then", "doing"), [("step", "waiting for the others to begin the step"), ("clip", "adding up the gradients' norm")]
)
@on_ranks(NUM_RANKS)
def test_rank_that_runs_out_of_batches_is_not_lost(rank: int, then: str, doing: str) -> None:
    with Pipeline(stages_with(Layer(), 0), plan_for(), loss_fn, timeout_s=math.inf) as pipeline:
        for _ in range(2):
            pipeline.step(*batch_of(4))
        if rank == 1:
            return
        message = error_of(pipeline.clip_grad_norm_, 1.0) if then == "clip" else error_of(pipeline.step, *batch_of(4))
    assert message == (
        f"LostRankError: rank 1 closed its pipeline without an error after 2 steps, but this rank goes on "
        f"({doing}); give all ranks the same number of batches, and make the same calls on all"
    )


def lose_a_rank_after_another_has_ended(rank: int) -> None:
    """Rank 0 has done its part of the last call when it ends; rank 2 dies in that call, and rank 1 waits for it."""

    def die_once_rank_0_has_ended(*_: object) -> None:
        while pipeline._engine.watchdog._roll_call.end() is None:
            pass
        os._exit(9)

    with Pipeline(stages_with(Layer(), 0), plan_for("forward_only"), None) as pipeline:
        if rank == 2:
            transport.send_value = die_once_rank_0_has_ended  # type: ignore[assignment]
        pipeline.forward(batch_of(4)[0], outputs=rank == 1)


def test_rank_that_did_its_part_and_ended_is_not_the_one_that_was_lost(tmp_path: Path) -> None:
    ended = run_fresh(tmp_path, NUM_RANKS, lose_a_rank_after_another_has_ended)
    assert [process.exit_code for process in ended] == [0, 1, 9], ended
    assert_lost(ended[1], "a rank", "bringing outputs from rank 2 to rank 1", first="")
